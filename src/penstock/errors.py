"""The error tree.

The class of an error says what the caller does next:

    PenstockError
    ├── UsageError              broken contract         → fix the call
    ├── StoreError
    │   ├── DeterminateError    not written             → may retry or give up
    │   │   └── StoreRefused    retry does not help     → intervention
    │   ├── IndeterminateError  may have been written   → find out
    │   │   └── DurabilityLost  an fsync failed         → stop; never fsync again
    │   └── Corruption          object damaged          → restore
    ├── SourceError
    │   ├── DefiniteError       about the data          → record it at its source time
    │   └── TransientError      about this attempt      → restart from the resume frontier
    ├── Fenced                  a newer owner exists    → exit; never retry
    └── InternalError           invariant violated      → stop, report

Add a class only if a caller would handle it differently.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "Corruption",
    "DefiniteError",
    "DeterminateError",
    "DurabilityLost",
    "Fenced",
    "IndeterminateError",
    "InternalError",
    "PenstockError",
    "Problem",
    "SourceError",
    "StoreError",
    "StoreRefused",
    "TransientError",
    "UsageError",
    "similar",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """One of several findings that an error reports, with its own hint."""

    message: str
    detail: str = ""
    hint: str = ""
    """The next action: the statement to run or the line to write."""


class PenstockError(Exception):
    """Base class of all errors of Penstock.

    `str(error)` is one line in lower case that names the object and has no final period.
    `detail` and `hint` are complete sentences. Both are also exception notes, because Spark
    returns the error of an executor to the driver as traceback text.

    With two or more `problems`, `detail` is a numbered list of them, each with its hint.
    """

    sqlstate: ClassVar[str] = "XX000"

    def __init__(
        self, message: str, *, detail: str = "", hint: str = "", problems: Sequence[Problem] = ()
    ) -> None:
        super().__init__(message)
        self.detail = detail = _numbered(problems) if len(problems) > 1 else detail
        self.hint = hint
        self.problems = tuple(problems)
        for label, text in (("detail", detail), ("hint", hint)):
            if text:
                self.add_note(f"{label}: {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would pass the keyword arguments of a subclass by position.
        return _restore, (type(self), self.args, self.__dict__)


class UsageError(PenstockError):
    """The call broke a contract. Nothing has changed."""

    sqlstate = "22023"


class StoreError(PenstockError):
    """An operation of a blob or log store failed."""

    sqlstate = "58000"


class DeterminateError(StoreError):
    """Nothing was written. The operation may be retried."""


class StoreRefused(DeterminateError):
    """Nothing was written, and a retry fails the same way until a person intervenes."""

    sqlstate = "58030"


class IndeterminateError(StoreError):
    """The outcome is indeterminate: the write may or may not have happened."""

    sqlstate = "08007"


class DurabilityLost(IndeterminateError):
    """An fsync failed.

    The kernel may have dropped the dirty pages, and a second fsync could then succeed without
    them. The writer never repeats the fsync: it stops and reopens.
    """

    sqlstate = "58030"


class Corruption(StoreError):
    """A stored object is missing or differs from the bytes that were written."""

    sqlstate = "XX001"

    def __init__(self, key: str, *, where: str, detail: str, hint: str = "") -> None:
        super().__init__(
            f'object "{key}" of location "{where}" is damaged',
            detail=detail,
            hint=hint or "Restore the object from a copy; Penstock never guesses its contents.",
        )
        self.key = key


class SourceError(PenstockError):
    """A source cannot be read."""

    sqlstate = "58000"


class DefiniteError(SourceError):
    """A fact about the data, recorded at its source time. Every later attempt finds it again."""


class TransientError(SourceError):
    """The attempt failed. The caller restarts from the durable resume frontier."""

    sqlstate = "08006"


class Fenced(PenstockError):
    """A newer owner exists. The process exits and never retakes ownership by itself."""

    sqlstate = "57P01"


class InternalError(PenstockError):
    """An invariant is violated. This is a bug: stop and report it."""


def similar(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates that `name` may be a misspelling of, closest first."""
    by_lower: dict[str, list[str]] = {}
    for candidate in sorted(candidates):
        by_lower.setdefault(candidate.lower(), []).append(candidate)
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return [candidate for lower in close for candidate in by_lower[lower]]


def _numbered(problems: Sequence[Problem]) -> str:
    lines = [f"{len(problems)} problems:"]
    for number, problem in enumerate(problems, 1):
        lines.append(f"{number}. {problem.message}")
        for label, text in (("detail", problem.detail), ("hint", problem.hint)):
            if text:
                lines.append(f"   {label}: {text}".replace("\n", "\n   "))
    return "\n".join(lines)


def _restore(
    kind: type[PenstockError], args: tuple[Any, ...], state: dict[str, Any]
) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
