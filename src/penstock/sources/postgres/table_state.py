"""State machine of one tracked table. Pure functions, no I/O.

A table is loaded from a snapshot while the stream is already read. Its changes are stored as
pending changes until the collection becomes visible, so a change that cannot be decoded is no
error yet: a TRUNCATE may make it irrelevant. Once the collection is visible, an
error is recorded in the collection at a definite time, and only a resync ends it.

                 SNAPSHOT_STARTED       SNAPSHOT_LINKED      MADE_VISIBLE
    (new) ──────────► LOADING ─────────────► LOADED ─────────────► LIVE
                        │ ▲ CHANGE_REJECTED    │ ▲                 │  ▲
                        ▼ │ TRUNCATED          ▼ │          FAILED │  │ RECOVERED
                 LOADING_REJECTED ─────► LOADED_REJECTED ────────► ERRORED
                        │      FAILED          │     MADE_VISIBLE  ▲
                        └──────► ERRORED_HIDDEN ◄──────────────────┘

The drift check ignores the messages of a table between the detection of a change and the resync in
the same tick. That is no state: it begins and ends within one tick (`tick_reader.py`).

Every state except REMOVED is durable. It is stored with the tick that caused it, as the four fields
of `StoredForm`, whose names and values are a format at rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final

from penstock.errors import InternalError

__all__ = ["TRANSITIONS", "Phase", "StoredForm", "TableEvent", "TableState", "next_state"]


class Phase(StrEnum):
    """Coarse state of a table, as it is stored and reported."""

    LOADING = "loading"
    LOADED = "loaded"
    LIVE = "live"
    ERRORED = "errored"


@dataclass(frozen=True, slots=True)
class StoredForm:
    """State of a table in the state store."""

    phase: Phase
    seen: bool = False
    """True once the collection has been visible."""

    has_collection: bool = True
    has_error: bool = False
    """True if an error is stored with the state."""


class TableState(Enum):
    """State of a table. The value is the stored form; None is not stored."""

    LOADING = StoredForm(Phase.LOADING)
    """The initial snapshot is read. Set by the snapshot tracker."""

    LOADING_REJECTED = StoredForm(Phase.LOADING, has_error=True)
    """As LOADING, with a pending change that cannot be decoded. Set by the tick reader."""

    LOADED = StoredForm(Phase.LOADED)
    """The files of the snapshot are linked, not visible. Set by the snapshot tracker."""

    LOADED_REJECTED = StoredForm(Phase.LOADED, has_error=True)
    """As LOADED, with a pending change that cannot be decoded. Set by the tick reader."""

    LIVE = StoredForm(Phase.LIVE, seen=True)
    """The collection is visible and equals the table. Set by the tick reader and by a resync."""

    ERRORED = StoredForm(Phase.ERRORED, seen=True, has_error=True)
    """Every read of the visible collection fails. Set by the tick reader."""

    ERRORED_HIDDEN = StoredForm(Phase.ERRORED, has_error=True)
    """The table failed before its collection was visible. Set by the tick reader."""

    UNTRACKABLE = StoredForm(Phase.ERRORED, has_collection=False, has_error=True)
    """No collection can hold the table; only the status reports it. Set by the table set."""

    REMOVED = None
    """The table is not tracked any more, and its stored state is deleted. Set by the table set."""

    @classmethod
    def from_stored(cls, form: StoredForm) -> "TableState":
        """Return the state with this stored form.

        Raises:
            InternalError: no state has this form.
        """
        for state in cls:
            if state.value == form:
                return state
        raise InternalError(f"no state of a table has the stored form {form}")

    @property
    def stored(self) -> StoredForm:
        """Return the stored form of a durable state."""
        form = self.value
        if not isinstance(form, StoredForm):
            raise InternalError(f"state {self.name} of a table is not stored")
        return form

    @property
    def phase(self) -> Phase:
        """Return the phase that the status reports."""
        return self.stored.phase

    @property
    def is_visible(self) -> bool:
        """Return whether readers see the collection."""
        return self.stored.seen

    @property
    def has_collection(self) -> bool:
        """Return whether a collection exists for the table."""
        return self.stored.has_collection

    @property
    def is_errored(self) -> bool:
        """Return whether only a resync or a new catalog description can end the error."""
        return self.phase == Phase.ERRORED

    @property
    def accepts_changes(self) -> bool:
        """Return whether changes of rows are applied or stored as pending."""
        return not self.stored.has_error


class TableEvent(Enum):
    """Event in the life of a table."""

    SNAPSHOT_STARTED = auto()
    """An initial snapshot begins, or begins again."""

    SNAPSHOT_LINKED = auto()
    """The files of the initial snapshot are linked by the tick."""

    COLLECTION_REJECTED = auto()
    """No collection can hold the table."""

    CHANGE_REJECTED = auto()
    """A change cannot be decoded while the collection is not visible."""

    TRUNCATED = auto()
    """The stream reports a TRUNCATE, which makes earlier pending changes irrelevant."""

    MADE_VISIBLE = auto()
    """All tables of the source are loaded, and their collections become visible."""

    FAILED = auto()
    """The table cannot be tracked any more. An errored table keeps its first error."""

    RECOVERED = auto()
    """A resync made the collection equal to the table, or replaced the collection."""

    REMOVED = auto()
    """The table left the publication or the pipeline file."""


_S, _E = TableState, TableEvent

TRANSITIONS: Final[Mapping[TableEvent, Mapping[TableState, TableState]]] = {
    _E.SNAPSHOT_STARTED: {
        _S.LOADING: _S.LOADING,
        _S.LOADING_REJECTED: _S.LOADING,
        _S.LOADED: _S.LOADING,
        _S.LOADED_REJECTED: _S.LOADING,
    },
    _E.SNAPSHOT_LINKED: {
        _S.LOADING: _S.LOADED,
        _S.LOADING_REJECTED: _S.LOADED_REJECTED,
    },
    _E.COLLECTION_REJECTED: {
        _S.LOADING: _S.UNTRACKABLE,
        _S.LOADING_REJECTED: _S.UNTRACKABLE,
        _S.LOADED: _S.UNTRACKABLE,
        _S.LOADED_REJECTED: _S.UNTRACKABLE,
    },
    _E.CHANGE_REJECTED: {
        _S.LOADING: _S.LOADING_REJECTED,
        _S.LOADED: _S.LOADED_REJECTED,
    },
    _E.TRUNCATED: {
        _S.LOADING: _S.LOADING,
        _S.LOADING_REJECTED: _S.LOADING,
        _S.LOADED: _S.LOADED,
        _S.LOADED_REJECTED: _S.LOADED,
        _S.LIVE: _S.LIVE,
    },
    _E.MADE_VISIBLE: {
        _S.LOADED: _S.LIVE,
        _S.LOADED_REJECTED: _S.ERRORED,
        _S.ERRORED_HIDDEN: _S.ERRORED,
    },
    _E.FAILED: {
        _S.LOADING: _S.ERRORED_HIDDEN,
        _S.LOADING_REJECTED: _S.ERRORED_HIDDEN,
        _S.LOADED: _S.ERRORED_HIDDEN,
        _S.LOADED_REJECTED: _S.ERRORED_HIDDEN,
        _S.LIVE: _S.ERRORED,
        _S.ERRORED: _S.ERRORED,
        _S.ERRORED_HIDDEN: _S.ERRORED_HIDDEN,
    },
    _E.RECOVERED: {
        _S.ERRORED: _S.LIVE,
    },
    _E.REMOVED: {state: _S.REMOVED for state in _S if state is not _S.REMOVED},
}
"""Next state by event and state. A missing pair is impossible."""


def next_state(state: TableState, event: TableEvent) -> TableState:
    """Return the state after an event.

    Raises:
        InternalError: the event is impossible in this state.
    """
    try:
        return TRANSITIONS[event][state]
    except KeyError:
        raise InternalError(f"event {event.name} of a table in state {state.name}") from None
