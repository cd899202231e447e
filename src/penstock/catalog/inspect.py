"""Status of the storage locations, collections and tasks of a lake.

Inspection writes nothing and needs read permission only. Sources and materializations store
their status in the state store of their storage location. The inspector reads it there, and
everything else from the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock import persist
from penstock.durable import Blob, children, disk_error, join
from penstock.ingest import PROGRESS_KEY, progress_views_in, source_states
from penstock.persist import Client
from penstock.persist.errors import format_ms
from penstock.persist.holds import Hold, list_holds
from penstock.persist.lake import (
    is_storage_location,
    storage_locations,
    storage_locations_below,
)
from penstock.persist.lock import may_be_alive
from penstock.persist.readability import error_as_of
from penstock.persist.state import END, CollectionState, State
from penstock.persist.state_store import FAILURE, PAUSED
from penstock.pipeline import CATALOG
from penstock.supervisor.status import (
    ErrorStatus,
    Kind,
    LoopStatus,
    MaterializationStatus,
    SourceStatus,
)

__all__ = [
    "LakeInspector",
    "ListedCollection",
    "LocationStatus",
    "StoredTask",
    "inspect_lake",
    "list_collections",
]

STATUS: Final = "status"
STOPPED: Final = "stopped"
RECOVERY: Final = "materialization"
"""State key that every materialization has, and no source."""


@dataclass(frozen=True, slots=True)
class StoredTask:
    """Last reported status of a source or materialization, as far as it still applies."""

    kind: Kind
    name: str
    status: LoopStatus
    error: ErrorStatus | None
    """Error that stopped the task, else the error in its status."""

    def to_json(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        error = None if self.error is None else self.error.to_json()
        return {self.kind: self.name, **self.status.to_json(), "error": error}


@dataclass(frozen=True, slots=True)
class LocationStatus:
    """Status of one storage location."""

    url: str
    disk_error: ErrorStatus | None
    id: str
    epoch: int
    entries: int
    writer: Mapping[str, Any] | None
    collections: Sequence[Mapping[str, Any]]
    tasks: Sequence[StoredTask]
    holds: Sequence[Mapping[str, Any]]
    garbage_files: int

    @property
    def is_running(self) -> bool:
        """Return whether the location has a live writer, as far as this host can determine."""
        return self.writer is not None and bool(self.writer["lives"])

    def to_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return {
            "location": self.url,
            "disk_error": None if self.disk_error is None else self.disk_error.to_json(),
            "id": self.id,
            "epoch": self.epoch,
            "entries": self.entries,
            "writer": self.writer,
            "collections": list(self.collections),
            "sources": [task.to_json() for task in self.tasks if task.kind == "source"],
            "materializations": [
                task.to_json() for task in self.tasks if task.kind == "materialization"
            ],
            "holds": list(self.holds),
            "garbage_files": self.garbage_files,
        }


def inspect_lake(
    location: str, settings: persist.Settings, *, hidden: bool = False
) -> list[LocationStatus]:
    """Return the status of the storage locations of a lake, or of one storage location.

    Args:
        location: URL of a lake or of a storage location.
        settings: Settings of the clients.
        hidden: Include hidden collections.

    Raises:
        UsageError: The location contains no storage location.
    """
    with LakeInspector(settings) as inspector:
        return [inspector.inspect(url, hidden=hidden) for url in storage_locations(location)]


class LakeInspector:
    """Repeated inspection that reads only the log entries written since the previous one.

    A context manager, for one thread at a time.
    """

    def __init__(self, settings: persist.Settings) -> None:
        self._settings = settings
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> "LakeInspector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all clients."""
        while self._clients:
            self._clients.popitem()[1].close()

    def locations(self, location: str) -> list[str]:
        """Return the storage locations that exist now, possibly none."""
        if location in self._clients or is_storage_location(location):
            return [location]
        below = [join(location, name) for name in children(location)]
        return [url for url in below if url in self._clients or is_storage_location(url)]

    def inspect(self, url: str, *, hidden: bool = False) -> LocationStatus:
        """Return the status of one storage location."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = persist.open(url, hold=False, settings=self._settings)
        try:
            return self._inspect(client, hidden=hidden)
        except BaseException:
            # After any error the next inspection opens a new client.
            self._clients.pop(url).close()
            raise

    def _inspect(self, client: Client, *, hidden: bool) -> LocationStatus:
        state = client.state
        now_ms = self._settings.clock.now_ms()
        holds = _holds(client.reader.machine.blob, state, now_ms)
        writer = state.writer
        disk = disk_error(client.url)
        return LocationStatus(
            url=client.url,
            disk_error=None if disk is None else ErrorStatus.of(disk),
            id=state.location,
            epoch=state.epoch,
            entries=state.seqno,
            writer=None
            if writer is None
            else {
                "id": writer.id,
                "host": writer.host,
                "pid": writer.pid,
                "lives": may_be_alive(writer),
                "since": format_ms(writer.taken_ms),
            },
            collections=[
                _collection(state.generations(name), holds) for name in state.listed(hidden=hidden)
            ],
            tasks=_tasks(client, state, now_ms),
            holds=holds,
            garbage_files=len(state.garbage),
        )


@dataclass(frozen=True, slots=True, order=True)
class ListedCollection:
    """A collection or a progress relation, by name."""

    name: str
    storage_location: str
    progress: bool = False


def list_collections(location: str) -> frozenset[ListedCollection]:
    """Return the collections and progress relations of a lake, without those of its catalog."""
    collections: set[ListedCollection] = set()
    catalog = join(location, CATALOG)
    for url in storage_locations_below(location):
        if url == catalog:
            continue
        folder = url.rstrip("/").rpartition("/")[2]
        with persist.open(url, hold=False) as client:
            collections.update(ListedCollection(name, folder) for name in client.collections())
            collections.update(
                ListedCollection(relation.name, folder, progress=True)
                for relation in progress_views_in(client)
                if relation.derived
            )
    return frozenset(collections)


def _collection(generations: list[CollectionState], holds: list[dict[str, Any]]) -> dict[str, Any]:
    *older, collection = generations
    owners = sorted(
        hold["owner"]
        for hold in holds
        if hold["sinces"].get(collection.name, END) < collection.allowed
    )
    return {
        "name": collection.name,
        "id": collection.id,
        "owner": collection.owner or None,
        "since": collection.since,
        "upper": collection.upper,
        "allowed": collection.allowed,
        "held_back_by": owners if collection.allowed > collection.since else [],
        "schema_version": collection.schemas[-1].version,
        "batches": len(collection.batches),
        "updates": sum(batch.rows for batch in collection.batches),
        "bytes": sum(batch.size for batch in collection.batches),
        "unsealed": any(batch.upper > collection.upper for batch in collection.batches),
        "error": _error(collection),
        "replaced": [
            {
                "id": generation.id,
                "since": generation.since,
                "upper": generation.upper,
                "bytes": sum(batch.size for batch in generation.batches),
                "error": _error(generation),
            }
            for generation in older
        ],
    }


def _tasks(client: Client, state: State, now_ms: int) -> list[StoredTask]:
    """Return the last reported status of the sources and materializations."""
    tasks: list[StoredTask] = []
    for name, task_state in source_states(client).items():
        if STATUS not in task_state and FAILURE not in task_state:
            continue
        stored = task_state.get(STATUS, {})
        if _is_materialization(task_state):
            status = MaterializationStatus.parse(stored)
            phase = _phase(task_state, status.phase, state)
            if phase in (STOPPED, PAUSED):
                # The collections may have advanced since the last report.
                status = status.updated(lag_ms=None)
            error = _failure(task_state) or status.error_status
            tasks.append(StoredTask("materialization", name, status.updated(phase=phase), error))
        else:
            source = SourceStatus.parse(stored)
            phase = _phase(task_state, source.phase, state)
            error = _failure(task_state) or source.error_status
            source = _with_lag(name, source.updated(phase=phase), state, now_ms)
            tasks.append(StoredTask("source", name, source, error))
    return tasks


def _phase(task_state: Mapping[str, Any], reported: str, state: State) -> str:
    """Return the last reported phase, unless the task cannot be running."""
    if task_state.get(PAUSED):
        return PAUSED
    return STOPPED if FAILURE in task_state or not _is_running(state) else reported


def _failure(task_state: Mapping[str, Any]) -> ErrorStatus | None:
    """Return the error that stopped a task."""
    return ErrorStatus.parse(task_state.get(FAILURE))


def _is_running(state: State) -> bool:
    """Return whether the storage location has a live writer, as far as this host can determine."""
    return state.writer is not None and may_be_alive(state.writer)


def _is_materialization(task_state: Mapping[str, Any]) -> bool:
    """Return whether this is the state of a materialization.

    A source stores the name of its progress relation first, and its status has a kind.
    """
    if FAILURE in task_state:
        return bool(task_state[FAILURE]["kind"] == "materialization")
    return RECOVERY in task_state or (
        PROGRESS_KEY not in task_state and "kind" not in task_state[STATUS]
    )


def _with_lag(name: str, status: SourceStatus, state: State, now_ms: int) -> SourceStatus:
    """Return the status with its current lag; None where the position of its server is not known.

    The collections are complete up to the last tick. With a backlog that may be now, and the
    position that the source has reached is older.
    """
    if status.phase in (STOPPED, PAUSED) or status.is_disconnected:
        return status.without_lag().updated(lag_ms=None)
    remap = state.named(f"{name}_remap")
    if remap is None or remap.upper == 0:
        return status.updated(lag_ms=None)
    return status.updated(lag_ms=max(0, now_ms - (remap.upper - 1), status.lag_ms or 0))


def _error(collection: CollectionState) -> dict[str, Any] | None:
    """Return the error at the latest time, or the error that starts later."""
    span = error_as_of(collection, max(collection.upper - 1, 0))
    if span is None and collection.errors and collection.errors[-1].upper == END:
        span = collection.errors[-1]
    if span is None:
        return None
    error = span.error
    return {
        "since": span.lower,
        "kind": error.kind,
        "message": error.message,
        "detail": error.detail,
        "hint": error.hint,
    }


def _holds(blob: Blob, state: State, now_ms: int) -> list[dict[str, Any]]:
    active = []
    for id, (_, hold) in sorted(list_holds(blob).items()):
        if id not in state.expired:
            active.append(_hold(hold, state, now_ms))
    return active


def _hold(hold: Hold, state: State, now_ms: int) -> dict[str, Any]:
    sinces: dict[str, int] = {}
    for id, since in sorted(hold.sinces.items()):
        if (collection := state.collections.get(id)) is not None:
            sinces[collection.name] = min(since, sinces.get(collection.name, END))
    return {
        "owner": hold.owner,
        "id": hold.id,
        "kind": "durable" if hold.lease_ms is None else "leased",
        "token": hold.token,
        "age_ms": max(0, now_ms - hold.placed_ms),
        "unchanged_ms": max(0, now_ms - hold.written_ms),
        "sinces": sinces,
    }
