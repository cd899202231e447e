"""Status of the storage locations, collections and tasks of a lake, as JSON values.

Inspection writes nothing and needs read permission only. Sources and materializations store
their status in the state store of their storage location. The inspector reads it there, and
everything else from the log.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from penstock import persist
from penstock.durable import Blob, children, disk_error, join
from penstock.ingest.progress_views import PROGRESS_KEY, progress_views_in, source_states
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
from penstock.pipeline.file import CATALOG

__all__ = ["LakeInspector", "ListedCollection", "inspect_lake", "list_collections"]

RECOVERY: Final = "materialization"
"""State key that every materialization has, and no source."""

LAGS: Final = ("lag_ms", "lag_bytes", "lag_records")


def inspect_lake(
    location: str, settings: persist.Settings, *, hidden: bool = False
) -> list[dict[str, Any]]:
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

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
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

    def inspect(self, url: str, *, hidden: bool = False) -> dict[str, Any]:
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

    def _inspect(self, client: Client, *, hidden: bool) -> dict[str, Any]:
        state = client.state
        now_ms = self._settings.clock.now_ms()
        holds = _holds(client.reader.machine.blob, state, now_ms)
        writer = state.writer
        disk = disk_error(client.url)
        return {
            "location": client.url,
            "disk_error": disk and {"message": str(disk), "detail": disk.detail, "hint": disk.hint},
            "id": state.location,
            "epoch": state.epoch,
            "entries": state.seqno,
            "writer": None
            if writer is None
            else {
                "id": writer.id,
                "host": writer.host,
                "pid": writer.pid,
                "lives": may_be_alive(writer),
                "since": format_ms(writer.taken_ms),
            },
            "collections": [
                _collection(state.generations(name), holds) for name in state.listed(hidden=hidden)
            ],
            **_tasks(client, state, now_ms),
            "holds": holds,
            "garbage_files": len(state.garbage),
        }


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


def _tasks(client: Client, state: State, now_ms: int) -> dict[str, list[dict[str, Any]]]:
    """Return the last reported status of the sources and materializations."""
    notes = {
        name: {"status": {}, **state_of}
        for name, state_of in source_states(client).items()
        if "status" in state_of or FAILURE in state_of
    }
    return {
        "sources": [
            {
                "source": name,
                **task_state["status"],
                "phase": _phase(task_state, state),
                **_lags(name, task_state, state, now_ms),
                "error": _task_error(task_state),
            }
            for name, task_state in notes.items()
            if not _is_materialization(task_state)
        ],
        "materializations": [
            {
                "materialization": name,
                **task_state["status"],
                "phase": (phase := _phase(task_state, state)),
                # The collections may have advanced since the last report.
                **({"lag_ms": None} if phase in ("stopped", PAUSED) else {}),
                "error": _task_error(task_state),
            }
            for name, task_state in notes.items()
            if _is_materialization(task_state)
        ],
    }


def _phase(task_state: dict[str, Any], state: State) -> str:
    """Return the last reported phase, unless the task cannot be running."""
    if task_state.get(PAUSED):
        return PAUSED
    if FAILURE in task_state or not _is_running(state):
        return "stopped"
    return str(task_state["status"].get("phase", ""))


def _task_error(task_state: dict[str, Any]) -> dict[str, str] | None:
    """Return the error that stopped a task, else the one in its status."""
    error = task_state.get(FAILURE) or task_state["status"].get("error")
    if not error:
        return None
    if isinstance(error, str):
        return {"message": error, "detail": "", "hint": ""}
    return {name: error.get(name) or "" for name in ("message", "detail", "hint")}


def _is_running(state: State) -> bool:
    """Return whether the storage location has a live writer, as far as this host can determine."""
    return state.writer is not None and may_be_alive(state.writer)


def _is_materialization(task_state: dict[str, Any]) -> bool:
    """Return whether this is the state of a materialization.

    A source stores the name of its progress relation first, and its status has a kind.
    """
    if FAILURE in task_state:
        return bool(task_state[FAILURE]["kind"] == "materialization")
    return RECOVERY in task_state or (
        PROGRESS_KEY not in task_state and "kind" not in task_state["status"]
    )


def _lags(
    source: str, task_state: dict[str, Any], state: State, now_ms: int
) -> dict[str, int | None]:
    """Return the lag of a source; None where the position of its server is not known.

    The collections are complete up to the last tick. With a backlog that may be now, and the
    position that the source has reached is older.
    """
    status = task_state["status"]
    if _phase(task_state, state) in ("stopped", PAUSED) or status.get("connected") is False:
        return {name: None for name in LAGS if name in status or name == "lag_ms"}
    remap = state.named(f"{source}_remap")
    if remap is None or remap.upper == 0:
        return {"lag_ms": None}
    return {"lag_ms": max(0, now_ms - (remap.upper - 1), status.get("lag_ms") or 0)}


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
