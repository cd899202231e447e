"""What came out: a table for people, JSON for programs."""

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
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """How one check ended, and why."""

    check: Check
    outcome: Outcome
    reason: str = ""
    """What was expected and what came; or why it was skipped."""

    messages: tuple[str, ...] = ()
    """The last that were exchanged, if it failed."""

    printed: tuple[str, ...] = ()
    """The last lines the connector printed meanwhile, if it failed and `command` started it."""

    notes: tuple[str, ...] = ()
    """What a check that passed could not look at."""

    elapsed_ms: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """How all of them ended."""

    results: tuple[Result, ...]

    @property
    def failed(self) -> Sequence[Result]:
        """Those that failed."""
        return [each for each in self.results if each.outcome is Outcome.FAILED]

    @property
    def counts(self) -> Counter[Outcome]:
        """How many ended how."""
        return Counter(each.outcome for each in self.results)

    def as_table(self) -> str:
        """Plain text: a line for each check, what failed in full, and a sum."""
        wide = max((len(each.check.name) for each in self.results), default=0)
        lines = []
        for each in self.results:
            about = each.reason.partition("\n")[0] if each.reason else "; ".join(each.notes)
            lines.append(f"{each.outcome.value:<7}  {each.check.name:<{wide}}  {about}".rstrip())
        for each in self.failed:
            lines += ["", *_in_full(each)]
        counts = self.counts
        total = ", ".join(f"{counts[each]} {each.value}" for each in Outcome)
        return "\n".join([*lines, "", total])

    def as_json(self) -> str:
        """The same as JSON, of which the keys stay."""
        return json.dumps(
            {
                "passed": self.counts[Outcome.PASSED],
                "failed": self.counts[Outcome.FAILED],
                "skipped": self.counts[Outcome.SKIPPED],
                "checks": [_as_object(each) for each in self.results],
            },
            ensure_ascii=False,
            indent=2,
        )


def _in_full(result: Result) -> list[str]:
    lines = [
        f"{result.check.name} failed",
        f"  rule: {result.check.rule} ({result.check.source})",
        *textwrap.indent(result.reason, "  ").split("\n"),
    ]
    if result.messages:
        lines += ["  last messages:", *(f"    {each}" for each in result.messages)]
    if result.printed:
        lines += ["  last lines of the connector:", *(f"    {each}" for each in result.printed)]
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
