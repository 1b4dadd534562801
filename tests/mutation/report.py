"""What a run found, for people and as JSON."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutation.accepted import Accepted, Kind
from tests.mutation.mutants import Mutant
from tests.mutation.project import Project
from tests.mutation.run import Result, Verdict


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdicts of a run beside the list of accepted survivors.

    Args:
        everything: All mutants of the packages, judged or not.
    """

    project: Project
    everything: list[Mutant]
    results: list[Result]
    accepted: list[Accepted]
    seconds: float

    @property
    def not_accepted(self) -> list[Result]:
        """Survivors that are not on the list."""
        return [r for r in self.results if not r.verdict.is_kill and self._entry_of(r.mutant) is None]

    def _entry_of(self, mutant: Mutant) -> Accepted | None:
        return next((entry for entry in self.accepted if entry.covers(mutant)), None)

    def stale(self) -> list[tuple[Accepted, str]]:
        """Entries of the list that are to be taken off, and why."""
        verdicts = {result.mutant: result.verdict for result in self.results}
        files = {mutant.file for mutant in self.everything}
        stale = []
        for entry in self.accepted:
            covered = [mutant for mutant in self.everything if entry.covers(mutant)]
            if not covered and (entry.file in files or not (self.project.root / entry.file).exists()):
                stale.append((entry, "there is no such mutant"))
            elif covered and all(mutant in verdicts and verdicts[mutant].is_kill for mutant in covered):
                stale.append((entry, "it is killed now"))
        return stale

    def packages(self) -> dict[str, dict[str, float]]:
        """Counts by package. The rate is the killed among the judged, equivalent survivors left out of both."""
        return {p: self._counts(p) for p in dict.fromkeys(self._package(r.mutant) for r in self.results)}

    def _counts(self, package: str) -> dict[str, float]:
        results = [result for result in self.results if self._package(result.mutant) == package]
        verdicts = Counter(result.verdict for result in results)
        killed = sum(verdicts[verdict] for verdict in Verdict if verdict.is_kill)
        entries = [self._entry_of(r.mutant) for r in results if not r.verdict.is_kill]
        num_equivalent = sum(entry is not None and entry.kind is Kind.EQUIVALENT for entry in entries)
        counted = len(results) - num_equivalent
        return {
            "mutants": sum(self._package(mutant) == package for mutant in self.everything),
            "judged": len(results),
            **{str(verdict): verdicts[verdict] for verdict in Verdict},
            "equivalent": num_equivalent,
            "not listed": entries.count(None),
            "rate": round(killed / counted, 4) if counted else 1.0,
        }

    def _package(self, mutant: Mutant) -> str:
        return self.project.package_of(mutant.file)

    def as_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "packages": self.packages(),
            "not listed": [result.mutant.name for result in self.not_accepted],
            "stale": [f"{entry.file}::{entry.node}: {why}" for entry, why in self.stale()],
            "results": [dataclasses.asdict(result) for result in self.results],
        }

    def print(self, console: Console) -> None:
        """Prints each survivor with its change, what is wrong with the list, and the counts."""
        for result in sorted(self.not_accepted, key=lambda r: (r.mutant.file, r.mutant.line)):
            mutant = result.mutant
            tests = "no test runs it" if result.verdict is Verdict.UNREACHED else f"{result.num_tests} tests pass"
            console.print(f"[bold]{escape(mutant.name)}[/] (line {mutant.line}; {tests})")
            console.print(_colored(mutant.diff.splitlines()))
        for entry, why in self.stale():
            console.print(f"[yellow]On the list, but {why}:[/] {escape(entry.file)}::{escape(entry.node)}")
        counts = self.packages()
        table = Table("package", box=None, caption=f"{self.seconds:.0f} s")
        for column in next(iter(counts.values())):
            table.add_column(column, justify="right")
        for package, row in counts.items():
            table.add_row(package, *(f"{v:.1%}" if column == "rate" else str(v) for column, v in row.items()))
        console.print(table)


def _colored(lines: Iterable[str]) -> str:
    return "\n".join(f"  [{'red' if line.startswith('-') else 'green'}]{escape(line)}[/]" for line in lines)
