"""Definition of a check, its outcomes, and the list of all checks."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.errors import InternalError, PenstockError
from penstock.testing.conformance.config import Config, Pattern

if TYPE_CHECKING:
    from penstock.testing.conformance.peer import Peer

__all__ = ["CHECKS", "Check", "Failed", "Need", "Skipped", "check", "why_skipped"]


class Need(enum.Enum):
    """Prerequisite of a check; the value is the reason to skip the check without it."""

    COMMAND = "there is no `command`, so the connector cannot be killed and started"
    READ = "there is no `read`, so what the endpoint holds cannot be seen"
    LOADS = "bindings take delta updates, so there is nothing to load"
    DELETES = "`accepts_delete` is false"
    DELTA = "`delta` is false: there are no delta bindings"
    HINT = "`exists` is exact, so it is never wrong"
    BREAKS_LOCKS = "`breaks_locks` is false: the endpoint has one writer, which cannot be ended"
    NEWER_WINS = "`newer_wins` is false: the endpoint cannot compare"


class Failed(PenstockError):
    """Violation of the rule by the connector."""


class Skipped(Exception):
    """Discovery that the rule cannot be tested with this connector, with the reason."""


Body = Callable[["Peer"], None]


@dataclass(frozen=True, slots=True)
class Check:
    """Rule and the function that tests it."""

    name: str
    rule: str
    """Requirement, as a sentence."""

    source: str
    """Document and section of the rule."""

    body: Body
    needs: tuple[Need, ...] = ()
    patterns: frozenset[Pattern] = frozenset(Pattern)
    otherwise: str = ""
    """Reason to skip the check for the other patterns."""


_CHECKS: Final[dict[str, Check]] = {}
CHECKS: Final[Mapping[str, Check]] = MappingProxyType(_CHECKS)
"""All checks by name, in the order of execution."""


def check(
    name: str,
    *,
    rule: str,
    source: str,
    needs: tuple[Need, ...] = (),
    patterns: frozenset[Pattern] = frozenset(Pattern),
    otherwise: str = "",
) -> Callable[[Body], Body]:
    """Add a function to the list of checks."""

    def listed(body: Body) -> Body:
        if name in _CHECKS:
            raise InternalError(f'there are two checks called "{name}"')
        _CHECKS[name] = Check(name, rule, source, body, needs, patterns, otherwise)
        return body

    return listed


def why_skipped(each: Check, config: Config, *, loads: bool) -> str:
    """Return the reason to skip a check; empty if there is none. `loads`: there are Loads."""
    if config.pattern not in each.patterns:
        return each.otherwise
    has = {
        Need.COMMAND: bool(config.command),
        Need.READ: bool(config.read),
        Need.LOADS: loads,
        Need.DELETES: config.accepts_delete,
        Need.DELTA: config.delta or config.pattern is Pattern.PUSH_ONLY,
        Need.HINT: config.exists == "hint",
        Need.BREAKS_LOCKS: config.breaks_locks,
        Need.NEWER_WINS: config.newer_wins,
    }
    return next((need.value for need in each.needs if not has[need]), "")
