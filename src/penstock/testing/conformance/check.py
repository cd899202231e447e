"""What a check is, how it ends, and the list of all of them."""

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
    """Without which a check cannot be made; its value is why."""

    COMMAND = "there is no `command`, so the connector cannot be killed and started"
    READ = "there is no `read`, so what the endpoint holds cannot be seen"
    LOADS = "bindings take delta updates, so there is nothing to load"
    DELETES = "`accepts_delete` is false"
    DELTA = "`delta` is false: there are no delta bindings"
    HINT = "`exists` is exact, so it is never wrong"
    BREAKS_LOCKS = "`breaks_locks` is false: the endpoint has one writer, which cannot be ended"
    NEWER_WINS = "`newer_wins` is false: the endpoint cannot compare"


class Failed(PenstockError):
    """The connector broke the rule."""


class Skipped(Exception):
    """It turned out that the rule cannot be tested here; says why."""


Body = Callable[["Peer"], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and the deed that tests it."""

    name: str
    rule: str
    """What is demanded, as a sentence."""

    source: str
    """Where the rule stands."""

    body: Body
    needs: tuple[Need, ...] = ()
    patterns: frozenset[Pattern] = frozenset(Pattern)
    otherwise: str = ""
    """Why it is not made for the other patterns."""


_CHECKS: Final[dict[str, Check]] = {}
CHECKS: Final[Mapping[str, Check]] = MappingProxyType(_CHECKS)
"""All of them by name, in the order they are made."""


def check(
    name: str,
    *,
    rule: str,
    source: str,
    needs: tuple[Need, ...] = (),
    patterns: frozenset[Pattern] = frozenset(Pattern),
    otherwise: str = "",
) -> Callable[[Body], Body]:
    """Put a function on the list."""

    def listed(body: Body) -> Body:
        if name in _CHECKS:
            raise InternalError(f'there are two checks called "{name}"')
        _CHECKS[name] = Check(name, rule, source, body, needs, patterns, otherwise)
        return body

    return listed


def why_skipped(each: Check, config: Config, *, loads: bool) -> str:
    """What is missing for this check; empty if nothing is. `loads`: whether there are Loads."""
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
