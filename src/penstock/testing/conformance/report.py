"""Report of a run: a table for people, JSON for programs."""

import enum
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.testing.conformance.check import Check

__all__ = ["Outcome", "Report", "Result"]


class Outcome(enum.StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one check, with the reason."""

    check: Check
    outcome: Outcome
    reason: str = ""
    """Expected and actual result, or the reason why the check was skipped."""

    messages: tuple[str, ...] = ()
    """Last messages of a failed check."""

    printed: tuple[str, ...] = ()
    """Last lines printed by the connector during a failed check, if `command` started it."""

    notes: tuple[str, ...] = ()
    """Parts of a passed check that could not be inspected."""

    elapsed_ms: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all checks."""

    results: tuple[Result, ...]

    @property
    def failed(self) -> Sequence[Result]:
        """Failed results."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def counts(self) -> Counter[Outcome]:
        """Number of results by outcome."""
        return Counter(result.outcome for result in self.results)

    def as_table(self) -> str:
        """Return plain text: a line for each check, the failures in full, and totals."""
        width = max((len(result.check.name) for result in self.results), default=0)
        lines = []
        for result in self.results:
            note = result.reason.partition("\n")[0] if result.reason else "; ".join(result.notes)
            name = f"{result.check.name:<{width}}"
            lines.append(f"{result.outcome.value:<7}  {name}  {note}".rstrip())
        for result in self.failed:
            lines += ["", *_failure_lines(result)]
        counts = self.counts
        total = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
        return "\n".join([*lines, "", total])

    def as_json(self) -> str:
        """Return the report as JSON; its keys are stable."""
        return json.dumps(
            {
                "passed": self.counts[Outcome.PASSED],
                "failed": self.counts[Outcome.FAILED],
                "skipped": self.counts[Outcome.SKIPPED],
                "checks": [_as_object(result) for result in self.results],
            },
            ensure_ascii=False,
            indent=2,
        )


def _failure_lines(result: Result) -> list[str]:
    lines = [
        f"{result.check.name} failed",
        f"  rule: {result.check.rule} ({result.check.source})",
        *textwrap.indent(result.reason, "  ").split("\n"),
    ]
    if result.messages:
        lines += ["  last messages:", *(f"    {message}" for message in result.messages)]
    if result.printed:
        lines += ["  last lines of the connector:", *(f"    {line}" for line in result.printed)]
    return lines


def _as_object(result: Result) -> dict[str, Any]:
    return {
        "name": result.check.name,
        "outcome": result.outcome.value,
        "rule": result.check.rule,
        "source": result.check.source,
        "reason": result.reason,
        "messages": list(result.messages),
        "printed": list(result.printed),
        "notes": list(result.notes),
        "elapsed_ms": result.elapsed_ms,
    }
