"""The mutators: what each makes of one node of a syntax tree.

A mutator is a function from a node to the nodes that may stand in its place; each of these is one mutant. Mutators know
nothing of files, names or tests. `mutants.py` walks a module and asks all of `MUTATORS` at each node.
"""

import ast
import copy
from collections.abc import Callable, Iterator

Mutator = Callable[[ast.AST], Iterator[ast.AST]]

NEGATED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OTHER_OPERATOR = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
# Functions and attributes that have an opposite of the same kind.
OPPOSITES = [
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("isneginf", "isposinf"),
    ("sin", "cos"),
    ("cumsum", "cumprod"),
    ("left", "right"),
    ("append", "appendleft"),
    ("popleft", "pop"),
    ("extend", "extendleft"),
    ("float32", "float16"),
]
OTHER_NAME = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}
# Calls that do not mind the order of what they are given.
COMMUTATIVE = {"min", "max", "minimum", "maximum", "promote_types", "result_type", "array_equal", "gcd", "logaddexp"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _with(node: ast.AST, **fields) -> ast.AST:
    """A copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def comparison_negated(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:i], NEGATED[type(op)](), *node.ops[i + 1 :]])


def comparison_shifted(node: ast.AST) -> Iterator[ast.AST]:
    """Takes the boundary in, or leaves it out."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SHIFTED:
                yield _with(node, ops=[*node.ops[:i], SHIFTED[type(op)](), *node.ops[i + 1 :]])


def operator_changed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OTHER_OPERATOR:
        yield _with(node, op=OTHER_OPERATOR[type(node.op)]())


def operand_dropped(node: ast.AST) -> Iterator[ast.AST]:
    """Leaves the first operand of a sum or product: a factor or an offset that is forgotten."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv):
        yield node.left


def number_changed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield _with(node, value=node.value + 1)
        yield _with(node, value=node.value - 1)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield _with(node, value=2 * node.value if node.value else 1.0)


def boolean_flipped(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _with(node, value=not node.value)


def compared_text_changed(node: ast.AST) -> Iterator[ast.AST]:
    """Compares with a text that nothing equals or is in. Texts elsewhere are mostly messages, and are left alone."""
    if isinstance(node, ast.Compare):
        for i, (op, value) in enumerate(zip(node.ops, node.comparators, strict=True)):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                text = "" if isinstance(op, ast.In | ast.NotIn) else f"not {value.value}"
                other = ast.copy_location(ast.Constant(text), value)
                yield _with(node, comparators=[*node.comparators[:i], other, *node.comparators[i + 1 :]])


def logic_changed(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps `and` and `or`, and leaves one side out."""
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for i in range(len(node.values)):
            left = [*node.values[:i], *node.values[i + 1 :]]
            yield _with(node, values=left) if len(left) > 1 else left[0]


def negation_dropped(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand


def condition_fixed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.IfExp):
        yield _with(node, test=ast.copy_location(ast.Constant(True), node.test))
        yield _with(node, test=ast.copy_location(ast.Constant(False), node.test))
    elif isinstance(node, ast.While):  # one that is always true never ends: that takes long to see, and says little
        yield _with(node, test=ast.copy_location(ast.Constant(False), node.test))
    elif isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)):
            yield _with(node, ifs=[*node.ifs[:i], *node.ifs[i + 1 :]])


def name_swapped(node: ast.AST) -> Iterator[ast.AST]:
    """Takes `max` for `min`, and the like."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OTHER_NAME:
        yield _with(node, func=_with(node.func, id=OTHER_NAME[node.func.id]))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in OTHER_NAME:
        yield _with(node, attr=OTHER_NAME[node.attr])


def branches_swapped(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps what `where(condition, a, b)` and its like choose from."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("where", "select"):
        if len(node.args) == 3:
            yield _with(node, args=[node.args[0], node.args[2], node.args[1]])
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)


def arguments_swapped(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps two neighbours among the positional arguments."""
    if isinstance(node, ast.Call) and not any(isinstance(arg, ast.Starred) for arg in node.args):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        for i in range(0 if name in COMMUTATIVE else len(node.args) - 1):
            a, b = node.args[i : i + 2]
            if ast.dump(a) != ast.dump(b):
                yield _with(node, args=[*node.args[:i], b, a, *node.args[i + 2 :]])


def keyword_dropped(node: ast.AST) -> Iterator[ast.AST]:
    """Leaves out one `name=value` of a call: an axis, a dtype, a mask. `strict=` stays: it tells of other faults."""
    if isinstance(node, ast.Call):
        for i in (i for i, keyword in enumerate(node.keywords) if keyword.arg != "strict"):
            yield _with(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def bound_dropped(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper", "step"):
            if getattr(node, bound) is not None:
                yield _with(node, **{bound: None})


def statement_removed(node: ast.AST) -> Iterator[ast.AST]:
    """Removes a call, a raise, a deletion, or an assignment to a thing that was there before."""
    removable = (
        isinstance(node, ast.Raise | ast.Delete | ast.AugAssign)
        or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom))
        or (isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets))
    )
    if removable:
        yield ast.copy_location(ast.Pass(), node)


def loop_left(node: ast.AST) -> Iterator[ast.AST]:
    """Swaps `break` and `continue`."""
    if isinstance(node, ast.Break | ast.Continue):
        other = ast.Continue if isinstance(node, ast.Break) else ast.Break
        yield ast.copy_location(other(), node)


def return_changed(node: ast.AST) -> Iterator[ast.AST]:
    """Returns None where a value is due; a boolean expression is turned round."""
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        if isinstance(node.value, ast.Compare | ast.BoolOp):
            value = ast.UnaryOp(ast.Not(), node.value)
        else:
            value = ast.Constant(None)
        yield _with(node, value=ast.copy_location(value, node.value))


def handler_dropped(node: ast.AST) -> Iterator[ast.AST]:
    """Lets pass on what an `except` would handle."""
    if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
        yield _with(node, body=[ast.copy_location(ast.Raise(), node.body[0])])


MUTATORS: dict[str, Mutator] = {
    mutator.__name__: mutator
    for mutator in (
        comparison_negated,
        comparison_shifted,
        operator_changed,
        operand_dropped,
        number_changed,
        boolean_flipped,
        compared_text_changed,
        logic_changed,
        negation_dropped,
        condition_fixed,
        name_swapped,
        branches_swapped,
        arguments_swapped,
        keyword_dropped,
        bound_dropped,
        statement_removed,
        loop_left,
        return_changed,
        handler_dropped,
    )
}
