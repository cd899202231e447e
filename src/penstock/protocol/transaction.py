"""The order of messages, as a table.

Each end says what it sends and what it receives, and learns at once if it may
not be. The two directions of the stream are not ordered against each other, so
where a stream is are two things: the last kind of request, and the last kind of
response.

    request        after these requests               and these responses
    ─────────────────────────────────────────────────────────────────────
    Open           (nothing)                          (nothing)
    Acknowledge    Open, StartCommit                  Opened, StartedCommit, Acknowledged
    Load           Acknowledge, Load                  Opened, StartedCommit, Acknowledged, Loaded
    Flush          Acknowledge, Load                  Acknowledged, Loaded
    Store          Flush, Store                       Flushed
    StartCommit    Flush, Store                       Flushed

    response       after these responses              and these requests
    ─────────────────────────────────────────────────────────────────────
    Opened         (nothing)                          Open
    Acknowledged   Opened, StartedCommit              any
    Loaded         Acknowledged, Loaded               Load, Flush
    Flushed        Acknowledged, Loaded               Flush
    StartedCommit  Flushed                            StartCommit

Acknowledged may come before Acknowledge. It is never taken for that of another
transaction: between two of them there is a StartedCommit, which only StartCommit
brings, which only Flushed allows, which only Flush brings, which only the first
allows. One thing the kinds do not say: there is a Loaded only if there was a Load.
"""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.messages import Kind

__all__ = ["NOTHING", "RULES", "Role", "Rule", "Transaction"]


class Role(enum.Enum):
    """Who we are."""

    RUNTIME = "runtime"
    CONNECTOR = "connector"


class _Nothing(enum.Enum):
    NOTHING = "nothing"

    def __str__(self) -> str:
        return "nothing"


NOTHING: Final = _Nothing.NOTHING
_Last = Kind | _Nothing


@dataclass(frozen=True, slots=True)
class Rule:
    """When a message may be sent: after these of its own direction, and of the other."""

    after: frozenset[_Last]
    given: frozenset[_Last]


REQUESTS: Final = frozenset(
    {
        Kind.OPEN,
        Kind.LOAD,
        Kind.FLUSH,
        Kind.STORE,
        Kind.START_COMMIT,
        Kind.ACKNOWLEDGE,
    }
)
_COMMITTED: Final = frozenset({Kind.OPENED, Kind.STARTED_COMMIT, Kind.ACKNOWLEDGED})
_LOADING: Final = frozenset({Kind.ACKNOWLEDGED, Kind.LOADED})

RULES: Final[Mapping[Kind, Rule]] = {
    Kind.OPEN: Rule(frozenset({NOTHING}), frozenset({NOTHING})),
    Kind.ACKNOWLEDGE: Rule(frozenset({Kind.OPEN, Kind.START_COMMIT}), _COMMITTED),
    Kind.LOAD: Rule(frozenset({Kind.ACKNOWLEDGE, Kind.LOAD}), _COMMITTED | {Kind.LOADED}),
    Kind.FLUSH: Rule(frozenset({Kind.ACKNOWLEDGE, Kind.LOAD}), _LOADING),
    Kind.STORE: Rule(frozenset({Kind.FLUSH, Kind.STORE}), frozenset({Kind.FLUSHED})),
    Kind.START_COMMIT: Rule(frozenset({Kind.FLUSH, Kind.STORE}), frozenset({Kind.FLUSHED})),
    Kind.OPENED: Rule(frozenset({NOTHING}), frozenset({Kind.OPEN})),
    Kind.ACKNOWLEDGED: Rule(frozenset({Kind.OPENED, Kind.STARTED_COMMIT}), REQUESTS),
    Kind.LOADED: Rule(_LOADING, frozenset({Kind.LOAD, Kind.FLUSH})),
    Kind.FLUSHED: Rule(_LOADING, frozenset({Kind.FLUSH})),
    Kind.STARTED_COMMIT: Rule(frozenset({Kind.FLUSHED}), frozenset({Kind.START_COMMIT})),
}

_ANSWERS: Final[Mapping[_Last, Kind]] = {
    Kind.OPEN: Kind.OPENED,
    Kind.ACKNOWLEDGE: Kind.ACKNOWLEDGED,
    Kind.LOAD: Kind.ACKNOWLEDGED,
    Kind.FLUSH: Kind.FLUSHED,
    Kind.START_COMMIT: Kind.STARTED_COMMIT,
}


@dataclass(frozen=True, slots=True)
class Transaction:
    """Where a stream is, as one of its ends knows it."""

    role: Role
    request: _Last = NOTHING
    response: _Last = NOTHING
    asked: bool = False
    """Whether there was a Load since Acknowledge."""

    def sends(self, kind: Kind) -> Self:
        """Where the stream is once we have sent this.

        Raises:
            LocalProtocolError: it may not be sent now.
        """
        if ours := self._broken(kind, sent=True):
            raise LocalProtocolError(f"{kind} may not be sent {ours}", hint=_hint(kind))
        return self._after(kind)

    def receives(self, kind: Kind) -> Self:
        """Where the stream is now that this has come.

        Raises:
            RemoteProtocolError: it may not come now.
        """
        if theirs := self._broken(kind, sent=False):
            raise RemoteProtocolError(f"{kind} came {theirs}", hint=_hint(kind))
        return self._after(kind)

    def ends(self) -> None:
        """The runtime says no more.

        Raises:
            RemoteProtocolError: there is a transaction that it leaves unfinished.
        """
        if self.request in (Kind.LOAD, Kind.FLUSH, Kind.STORE, Kind.START_COMMIT):
            raise RemoteProtocolError(
                f"unexpected EOF after {self.request}",
                detail="There are keys to load, or documents to store, that were not committed.",
                hint="Close the stream after Acknowledged, or cancel it.",
            )

    @property
    def idle(self) -> bool:
        """Whether no transaction is under way."""
        return self.request is Kind.ACKNOWLEDGE and self.response is Kind.ACKNOWLEDGED

    @property
    def awaited(self) -> Kind | None:
        """The answer that is to come, if the last request has one that has not come."""
        answer = _ANSWERS.get(self.request)
        return answer if answer is not None and self.response in RULES[answer].after else None

    def _broken(self, kind: Kind, *, sent: bool) -> str:
        """Why this may not be said now; empty if it may."""
        rule = RULES[kind]
        of_runtime = kind in REQUESTS
        if of_runtime is not ((self.role is Role.RUNTIME) is sent):
            return f"by the {'connector' if of_runtime else 'runtime'}"
        own, other = (self.request, self.response) if of_runtime else (self.response, self.request)
        if own not in rule.after:
            return f"after {own}"
        if other not in rule.given:
            return f"before {_awaited(kind)}" if _awaited(kind) else f"while {other} was the last"
        if kind is Kind.LOADED and not self.asked:
            return "though no Load asked for it"
        return ""

    def _after(self, kind: Kind) -> Self:
        if kind not in REQUESTS:
            return dataclasses.replace(self, response=kind)
        asked = kind is Kind.LOAD or (self.asked and kind is not Kind.ACKNOWLEDGE)
        return dataclasses.replace(self, request=kind, asked=asked)


def _awaited(kind: Kind) -> str:
    """The response that must have come first."""
    return {
        Kind.ACKNOWLEDGE: "StartedCommit",
        Kind.FLUSH: "Acknowledged",
        Kind.STORE: "Flushed",
        Kind.START_COMMIT: "Flushed",
    }.get(kind, "")


def _hint(kind: Kind) -> str:
    rule = RULES[kind]
    after = ", ".join(sorted(str(each) for each in rule.after))
    given = ", ".join(sorted(str(each) for each in rule.given))
    return f"{kind} follows {after} of its own direction, and {given} of the other."
