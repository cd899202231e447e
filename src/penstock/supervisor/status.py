"""Typed status of sources and materializations.

A loop produces its status, and stores it as JSON in the state of its task. The CLI, the status
page and the metrics read these types. `parse` is the only place that reads the stored JSON.

A key that is absent differs from a key that is null: `lag_records` is null while Kafka does not
answer, and absent for Postgres. So a status has the set of its keys (`keys`), and releases that
wrote fewer keys can be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, Self

import msgspec

from penstock.errors import InternalError, PenstockError
from penstock.supervisor.states import State

__all__ = [
    "BindingStatus",
    "ErrorStatus",
    "FrozenBinding",
    "Kind",
    "LoopStatus",
    "MaterializationStatus",
    "PartitionStatus",
    "SourceStatus",
    "State",
    "StepStatus",
    "TableStatus",
    "TaskStatus",
]

Kind = Literal["source", "materialization"]


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Error of a task, as text."""

    message: str = ""
    detail: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the texts of an error."""
        if isinstance(error, PenstockError):
            return cls(str(error), error.detail, error.hint)
        return cls(repr(error))

    @classmethod
    def parse(cls, stored: Any) -> Self | None:
        """Return a stored error: an object, or the message of a materialization; None if empty."""
        if not stored:
            return None
        if isinstance(stored, str):
            return cls(stored)
        return cls(*(stored.get(name) or "" for name in ("message", "detail", "hint")))

    def to_json(self) -> dict[str, str]:
        """Return the error as a JSON object."""
        return {"message": self.message, "detail": self.detail, "hint": self.hint}

    def to_sentences(self) -> str:
        """Return message, detail and hint, joined by periods."""
        parts = (self.message, self.detail, self.hint)
        return ". ".join(part.rstrip(".") for part in parts if part)


@dataclass(frozen=True, slots=True)
class _Status:
    """Status with the JSON keys that it has."""

    keys: frozenset[str] = frozenset()
    """Keys of the JSON object, in any order."""

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> Self:
        """Return the status of a stored JSON object; unknown keys are ignored.

        Raises:
            InternalError: a value has the wrong type.
        """
        try:
            status = msgspec.convert({**stored, "keys": ()}, cls)
        except msgspec.ValidationError as error:
            raise InternalError("stored status is malformed", detail=f"{error}.") from error
        return replace(status, keys=frozenset(stored) & _field_names(cls))

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return a status with exactly these keys."""
        return cls(keys=frozenset(values), **values)

    def updated(self, **changes: Any) -> Self:
        """Return the status with some fields changed or added."""
        return replace(self, keys=self.keys | changes.keys(), **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        # The round trip through bytes makes lists of tuples, as in a stored status.
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return {name: value for name, value in values.items() if name in self.keys}


def _field_names(kind: type[_Status]) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind)) - {"keys"}


@dataclass(frozen=True, slots=True)
class TableStatus:
    """Status of one table of a source."""

    name: str = ""
    collection: str = ""
    phase: str = ""
    rows: int = 0
    estimated_rows: float | int | None = None
    bytes: int | None = None
    error: str | None = None
    error_detail: str = ""
    error_hint: str = ""

    @property
    def error_status(self) -> ErrorStatus | None:
        """Return the error of the table."""
        if not self.error:
            return None
        return ErrorStatus(self.error, self.error_detail, self.error_hint)


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Position of a source in one partition."""

    partition: int | str
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class SourceStatus(_Status):
    """Status of a source. Positions and lags depend on its kind."""

    kind: str = ""
    """Kind of the connector: postgres, kafka."""

    server: str = ""
    phase: str = ""
    lsn: str | None = None
    topic_id: str | None = None
    position: str | None = None
    """Offsets of a Kafka source, as text."""

    lag_bytes: int | None = None
    lag_ms: int | None = None
    lag_records: int | None = None
    slot: str | None = None
    slot_bytes: int | None = None
    """WAL that the replication slot retains."""

    slot_warning: str | None = None
    bad_records: int | None = None
    sent_again: int | None = None
    waiting_events: int | None = None
    waits_for: str | None = None
    partitions: tuple[PartitionStatus, ...] = ()
    tables: tuple[TableStatus, ...] = ()
    connected: bool | None = None
    """None in a status of an earlier release."""

    disconnected_since_ms: int | None = None
    disconnected_reason: str | None = None
    catching_up: bool = False
    rows: int | None = None
    """Rows since the start of the process."""

    bytes: int | None = None
    counted_since_ms: int | None = None
    as_of: int | None = None
    """Time up to which the collections are complete; None before the initial snapshot is."""

    written_ms: int | None = None
    error: ErrorStatus | None = None

    @property
    def error_status(self) -> ErrorStatus | None:
        """Return the error that stopped the source."""
        return self.error

    @property
    def is_disconnected(self) -> bool:
        """Return whether the source is known to have no connection to its server."""
        return self.connected is False

    def without_lag(self) -> "SourceStatus":
        """Return the status of a source whose server does not answer: each lag is null."""
        return self.updated(**{name: None for name in LAG_KEYS if name in self.keys})


LAG_KEYS: Final = ("lag_bytes", "lag_ms", "lag_records")


@dataclass(frozen=True, slots=True)
class BindingStatus:
    """Counters of one binding."""

    collection: str
    resource: str = ""
    delta_updates: bool = False
    deletes: bool = True
    documents: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class FrozenBinding:
    """An errored collection whose bindings are frozen."""

    collection: str
    time: int
    message: str
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StepStatus:
    """A request to the connector that takes longer than the answer deadline."""

    step: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class MaterializationStatus(_Status):
    """Status of a materialization."""

    phase: str = ""
    upper: int = 0
    """Frontier of the endpoint: it has all changes below this time."""

    lag_ms: int | None = None
    """Lag of the endpoint behind its collections."""

    waits_for: str | None = None
    waiting: StepStatus | None = None
    left_behind: tuple[str, ...] = ()
    """Collections in `degraded`."""

    degraded: tuple[FrozenBinding, ...] = ()
    documents: int | None = None
    """Documents since the start of the process."""

    bytes: int | None = None
    transactions: int | None = None
    counted_since_ms: int | None = None
    last_transaction: Mapping[str, int] = field(default_factory=dict[str, int])
    """Duration of each step of the last transaction."""

    bindings: tuple[BindingStatus, ...] = ()
    error: str | None = None

    @property
    def error_status(self) -> ErrorStatus | None:
        """Return the last error."""
        return ErrorStatus.parse(self.error)


LoopStatus = SourceStatus | MaterializationStatus


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """Status of a supervised task, with the status of its loop."""

    kind: Kind
    state: State
    restarts: int
    error: ErrorStatus | None
    loop: LoopStatus | None
    """None before the loop is built."""

    @property
    def source(self) -> SourceStatus:
        """Return the status of a source; without a value before its loop is built."""
        return self.loop if isinstance(self.loop, SourceStatus) else SourceStatus()

    @property
    def materialization(self) -> MaterializationStatus:
        """Return the status of a materialization; without a value before its loop is built."""
        return (
            self.loop if isinstance(self.loop, MaterializationStatus) else MaterializationStatus()
        )

    @property
    def phase(self) -> str:
        """Return the phase that the loop reports; empty before the loop is built."""
        return "" if self.loop is None else self.loop.phase

    @property
    def waits_for(self) -> str:
        """Return the condition that the loop waits for, or an empty string."""
        return "" if self.loop is None else self.loop.waits_for or ""

    def to_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return {
            **({} if self.loop is None else self.loop.to_json()),
            "kind": self.kind,
            "state": self.state,
            "restarts": self.restarts,
            "error": None if self.error is None else self.error.to_json(),
        }
