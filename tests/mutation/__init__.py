"""Wrong programs on purpose: does a test notice each?

A mutant is one small change of the syntax tree of one module of `ops`, `paging`, `engine` or `cache`: a comparison that
is off by its boundary, an operand left out, two arguments swapped, a statement removed. The tests of the module's
package run on it. If one fails the mutant is killed. If all pass it survives: either no test sees the behaviour that
was changed, or the change makes no difference to what the package promises.

    python -m tests.mutation                                        all mutants: hours
    python -m tests.mutation --package paging --module pool.py      those of one module: minutes
    python -m tests.mutation --count 200 --seed 0                   a sample over all modules, which the slow suite runs

The command prints each survivor with its change, and ends with 1 if one of them is not in `survivors.toml`: the list of
accepted survivors by file, node and reason. It also names what is on that list and is killed, or is no mutant any more.
A mutant that takes too long or crashes is killed, and counted apart. `--json` writes all verdicts.

The kill rate is killed / judged. A survivor that is listed as equivalent is left out, since nothing changes that the
package promises. One that is listed as unseen counts against the rate: no test sees that behaviour so far.

To deal with a survivor: write the test that would have noticed (`--module` and `--node` judge that mutant again), or
put it on the list with the reason. A node is named by function, mutator and number within the function, so that edits
elsewhere do not touch the list.

What is not mutated, because no test could or should see it: annotations, docstrings and formatted text, the arguments
of a raised error, functions that return an error, `__repr__`, `__str__`, `__slots__`, `__all__`, imports,
`TYPE_CHECKING` blocks, dataclass decorators, `strict=` of `zip`.

How it is fast: the parent imports what others wrote (JAX, Flax, pytest) and nothing of this project, and forks a child
a mutant. The child imports the project, with the changed tree in place of one module, and runs pytest in its own
process. Before that, all tests ran once on the source as it is, with each statement noting that it ran: a mutant gets
those tests alone that run its statement, the quick ones first, until one fails. Only of an accepted survivor's tests
those are left out that would go beyond `--budget` seconds. A JAX compilation cache spares what the mutant did not
change. A failure counts only if the test passes without a mutant: all did at first, and those that killed run once more
at the end.

To be read in this order: `mutators.py` (what is changed), `mutants.py` (names, the draw), `project.py` (which tests
must notice), `run.py` (a run from end to end), `child.py` (what a child does), `pool.py` (children), `accepted.py` and
`report.py` (what is said), `__main__.py` (the command).
"""
