"""Order of the messages of a stream, as a table.

Each side passes the kind of every message it sends or receives, and the table rejects a message
that is out of order. The two directions of a stream are not ordered against each other. The state
of a stream therefore has two parts: the last request and the last response.

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

Acknowledged may arrive before Acknowledge. It still belongs to one transaction only. Two
Acknowledged are separated by a StartedCommit, which follows StartCommit, which follows Flushed,
which follows Flush, which follows the first Acknowledged.

One rule is not in the table: Loaded requires a Load in the same transaction.
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
    """Side of the stream."""

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
    """Allowed last messages, in the direction of the message and in the other direction."""

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

_RESPONSES: Final[Mapping[_Last, Kind]] = {
    Kind.OPEN: Kind.OPENED,
    Kind.ACKNOWLEDGE: Kind.ACKNOWLEDGED,
    Kind.LOAD: Kind.ACKNOWLEDGED,
    Kind.FLUSH: Kind.FLUSHED,
    Kind.START_COMMIT: Kind.STARTED_COMMIT,
}


@dataclass(frozen=True, slots=True)
class Transaction:
    """State of a stream, as one of its sides knows it."""

    role: Role
    request: _Last = NOTHING
    response: _Last = NOTHING
    has_load: bool = False
    """True if a Load followed the last Acknowledge."""

    def after_sending(self, kind: Kind) -> Self:
        """Return the state after we send a message.

        Raises:
            LocalProtocolError: the message may not be sent now.
        """
        if violation := self._violation(kind, sent=True):
            raise LocalProtocolError(f"{kind} may not be sent {violation}", hint=_hint(kind))
        return self._after(kind)

    def after_receiving(self, kind: Kind) -> Self:
        """Return the state after the peer has sent a message.

        Raises:
            RemoteProtocolError: the peer may not send the message now.
        """
        if violation := self._violation(kind, sent=False):
            raise RemoteProtocolError(f"{kind} was sent {violation}", hint=_hint(kind))
        return self._after(kind)

    def check_end(self) -> None:
        """Check that the runtime may end the stream now.

        Raises:
            RemoteProtocolError: a transaction is in progress.
        """
        if self.request in (Kind.LOAD, Kind.FLUSH, Kind.STORE, Kind.START_COMMIT):
            raise RemoteProtocolError(
                f"unexpected EOF after {self.request}",
                detail="The last transaction was not committed.",
                hint="Close the stream after Acknowledged, or cancel it.",
            )

    @property
    def idle(self) -> bool:
        """Return whether no transaction is in progress."""
        return self.request is Kind.ACKNOWLEDGE and self.response is Kind.ACKNOWLEDGED

    @property
    def awaited_response(self) -> Kind | None:
        """Return the response that the last request still needs; None if there is none."""
        response = _RESPONSES.get(self.request)
        if response is None or self.response not in RULES[response].after:
            return None
        return response

    def _violation(self, kind: Kind, *, sent: bool) -> str:
        """Return why a message is out of order; empty if it is allowed."""
        rule = RULES[kind]
        is_request = kind in REQUESTS
        if is_request is not ((self.role is Role.RUNTIME) is sent):
            return f"by the {'connector' if is_request else 'runtime'}"
        own, other = (self.request, self.response) if is_request else (self.response, self.request)
        if own not in rule.after:
            return f"after {own}"
        if other not in rule.given:
            first = _required_response(kind)
            return f"before {first}" if first else f"when {other} was the last request"
        if kind is Kind.LOADED and not self.has_load:
            return "without a Load"
        return ""

    def _after(self, kind: Kind) -> Self:
        if kind not in REQUESTS:
            return dataclasses.replace(self, response=kind)
        has_load = kind is Kind.LOAD or (self.has_load and kind is not Kind.ACKNOWLEDGE)
        return dataclasses.replace(self, request=kind, has_load=has_load)


def _required_response(kind: Kind) -> str:
    """Return the response that a request must wait for."""
    return {
        Kind.ACKNOWLEDGE: "StartedCommit",
        Kind.FLUSH: "Acknowledged",
        Kind.STORE: "Flushed",
        Kind.START_COMMIT: "Flushed",
    }.get(kind, "")


def _hint(kind: Kind) -> str:
    rule = RULES[kind]
    after = ", ".join(sorted(map(str, rule.after)))
    given = ", ".join(sorted(map(str, rule.given)))
    return f"{kind} must follow {after} in its direction, and {given} in the other direction."
