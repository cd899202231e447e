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

__all__ = ["CHECKS", "Check", "Failed", "Need", "Skipped", "check", "skip_reason"]


class Need(enum.Enum):
    """Prerequisite of a check; the value is the reason to skip the check without it."""

    COMMAND = "without `command`, the connector cannot be killed and started"
    READ = "without `read`, the contents of the endpoint cannot be inspected"
    LOADS = "the bindings use delta updates, so there are no loads"
    DELETES = "`accepts_delete` is false"
    DELTA = "`delta` is false: there are no delta bindings"
    HINT = "`exists` is exact: the runtime never sends a wrong value"
    BREAKS_LOCKS = "`breaks_locks` is false: a hung writer blocks the endpoint"
    NEWER_WINS = "`newer_wins` is false: the endpoint cannot compare versions"


class Failed(PenstockError):
    """Violation of the rule by the connector."""


class Skipped(Exception):
    """Signal that the rule cannot be tested with this connector, with the reason."""


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
    *,
    rule: str,
    source: str,
    needs: tuple[Need, ...] = (),
    patterns: frozenset[Pattern] = frozenset(Pattern),
    otherwise: str = "",
    name: str = "",
) -> Callable[[Body], Body]:
    """Return a decorator that adds a function to the list of checks.

    The name of the check is `name`, or else the name of the function with hyphens.
    """

    def add(body: Body) -> Body:
        check_name = name or getattr(body, "__name__", "").replace("_", "-")
        if check_name in _CHECKS:
            raise InternalError(f'check "{check_name}" is defined twice')
        _CHECKS[check_name] = Check(check_name, rule, source, body, needs, patterns, otherwise)
        return body

    return add


def skip_reason(check: Check, config: Config, *, loads: bool) -> str:
    """Return the reason to skip a check; empty if there is none. `loads`: there are Loads."""
    if config.pattern not in check.patterns:
        return check.otherwise
    is_met = {
        Need.COMMAND: bool(config.command),
        Need.READ: bool(config.read),
        Need.LOADS: loads,
        Need.DELETES: config.accepts_delete,
        Need.DELTA: config.delta or config.pattern is Pattern.PUSH_ONLY,
        Need.HINT: config.exists == "hint",
        Need.BREAKS_LOCKS: config.breaks_locks,
        Need.NEWER_WINS: config.newer_wins,
    }
    return next((need.value for need in check.needs if not is_met[need]), "")
