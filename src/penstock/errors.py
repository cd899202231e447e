"""The one tree of errors.

Catch by what you will do next:

    PenstockError
    ├── UsageError              broken contract         → fix the call
    ├── StoreError
    │   ├── DeterminateError    nothing was written     → may give up, may ask again
    │   │   └── StoreRefused    and asking will not help → a person must act
    │   ├── IndeterminateError  may have been written   → must find out
    │   │   └── DurabilityLost  a sync failed           → stop; never sync again
    │   └── Corruption          an object is damaged    → restore it; nothing is guessed
    ├── SourceError
    │   ├── DefiniteError       about the data          → record it at its source time
    │   └── TransientError      about the moment        → restart from the resume frontier
    ├── Fenced                  a newer owner exists    → stop, never retry
    └── InternalError           an invariant broke      → stop, report

A new class earns its place when someone would handle it differently.
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
    """One of several things that are wrong, with its own remedy."""

    message: str
    detail: str = ""
    hint: str = ""
    """The remedy: the statement to run or the line to write."""


class PenstockError(Exception):
    """Base of every error in the house.

    `str(error)` is one line: lower case, no full stop, names the object.
    `detail` and `hint` are sentences. Both also ride along as notes, because
    Spark brings an executor's error to the driver as traceback text.

    An error about several `problems` has them as its detail: a numbered list, with
    one remedy under each.
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
        # Subclasses take keywords, which the default would call positionally.
        return _restore, (type(self), self.args, self.__dict__)


class UsageError(PenstockError):
    """The call broke a contract. Nothing was changed."""

    sqlstate = "22023"


class StoreError(PenstockError):
    """Something below us, where bytes are kept, did not do as asked."""

    sqlstate = "58000"


class DeterminateError(StoreError):
    """It did not happen: nothing was written, and it may be asked again."""


class StoreRefused(DeterminateError):
    """It did not happen, and asking again will not help until a person acts."""

    sqlstate = "58030"


class IndeterminateError(StoreError):
    """It is in doubt: the write may or may not have happened."""

    sqlstate = "08007"


class DurabilityLost(IndeterminateError):
    """A sync failed.

    The kernel may already have dropped the bytes, so a second sync could
    succeed without them; nobody may try again, only stop and reopen.
    """

    sqlstate = "58030"


class Corruption(StoreError):
    """A stored object is missing or is not what was written."""

    sqlstate = "XX001"

    def __init__(self, key: str, *, where: str, detail: str, hint: str = "") -> None:
        super().__init__(
            f'object "{key}" of location "{where}" is damaged',
            detail=detail,
            hint=hint or "Restore the object from a copy; Penstock never guesses its contents.",
        )
        self.key = key


class SourceError(PenstockError):
    """Something upstream is not as it must be."""

    sqlstate = "58000"


class DefiniteError(SourceError):
    """A fact about the data: it is as true at the next attempt, and belongs at its time."""


class TransientError(SourceError):
    """About the moment: go back to what is durable, and try again from there."""

    sqlstate = "08006"


class Fenced(PenstockError):
    """A newer owner exists. Whoever gets this stops, and never takes back by itself."""

    sqlstate = "57P01"


class InternalError(PenstockError):
    """An invariant of ours does not hold. A bug; stop and report it."""


def similar(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names closest to `wanted`, which may be a misspelling, best first."""
    by_lower: dict[str, list[str]] = {}
    for name in sorted(names):
        by_lower.setdefault(name.lower(), []).append(name)
    close = difflib.get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.6)
    return [name for lower in close for name in by_lower[lower]]


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
