"""The error tree.

The class of an error says what the caller does next:

    PenstockError
    ├── UsageError              broken contract         → fix the call or the file
    ├── StoreError
    │   ├── DeterminateError    not written             → retry, or stop
    │   │   └── StoreRefused    retry does not help     → follow the hint, then open again
    │   ├── IndeterminateError  may have been written   → open again and read upper
    │   │   └── DurabilityLost  an fsync failed         → check the disk, restart the process
    │   └── Corruption          object damaged          → restore it from a copy
    ├── SourceError
    │   ├── DefiniteError       about the data          → follow the hint
    │   └── TransientError      about this attempt      → retry; tasks retry automatically
    ├── Fenced                  a newer owner exists    → exit; never retry
    └── InternalError           invariant violated      → stop, report

A source records a DefiniteError at its source time, and restarts from the resume frontier after a
TransientError. Add a class only if a caller would handle it differently. Modules that add classes
draw their part of the tree in the same way; the errors page is generated from all of them.
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
    """The call broke a contract, such as a write below upper. Nothing was changed."""

    sqlstate = "22023"


class StoreError(PenstockError):
    """Base class of errors of a blob or log store."""

    sqlstate = "58000"


class DeterminateError(StoreError):
    """The operation failed for longer than `patience_ms`. Nothing was written."""


class StoreRefused(DeterminateError):
    """The store rejects the operation, as without permission. Nothing was written."""

    sqlstate = "58030"


class IndeterminateError(StoreError):
    """The operation failed or was cancelled, and may have happened. The client writes no more."""

    sqlstate = "08007"


class DurabilityLost(IndeterminateError):
    """An fsync failed.

    The kernel may have dropped the dirty pages, and a second fsync could then succeed without
    them. The writer never repeats the fsync: it stops and reopens.
    """

    sqlstate = "58030"


class Corruption(StoreError):
    """A stored object, `error.key`, is missing or differs from the bytes that were written."""

    sqlstate = "XX001"

    def __init__(self, key: str, *, where: str, detail: str, hint: str = "") -> None:
        super().__init__(
            f'object "{key}" of location "{where}" is damaged',
            detail=detail,
            hint=hint or "Restore the object from a copy; Penstock never guesses its contents.",
        )
        self.key = key


class SourceError(PenstockError):
    """Base class of errors of a source."""

    sqlstate = "58000"


class DefiniteError(SourceError):
    """A fact about the data, which belongs to its source time. A retry gives the same error."""


class TransientError(SourceError):
    """The attempt failed: a source is unreachable, or a connection was lost."""

    sqlstate = "08006"


class Fenced(PenstockError):
    """A newer owner took the lock or the hold. Unacknowledged writes did not happen."""

    sqlstate = "57P01"


class InternalError(PenstockError):
    """An invariant is violated. This is a bug."""


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
