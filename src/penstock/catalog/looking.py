"""What a lake holds, and how each thing in it is: for people, as JSON has it.

Looking leaves no trace and needs only permission to read. Sources and
materializations say how they are in notes, beside what they write; a looker
reads the notes, and the log for everything else.
"""

from types import TracebackType
from typing import Any, Final

from penstock import persist
from penstock.durable import Blob, children, disk_error, join
from penstock.ingest.progress_views import PROGRESS_KEY, source_states
from penstock.persist import Client
from penstock.persist.errors import format_ms
from penstock.persist.holds import Hold, list_holds
from penstock.persist.lake import is_storage_location, storage_locations
from penstock.persist.lock import lives
from penstock.persist.readability import error_as_of
from penstock.persist.state import END, CollectionState, State
from penstock.persist.state_store import FAILURE, PAUSED

__all__ = ["Looker", "look"]

RECOVERY: Final = "materialization"
"""The note that a materialization has, and no source."""

LAGS: Final = ("lag_ms", "lag_bytes", "lag_records")


def look(
    location: str, settings: persist.Settings, *, hidden: bool = False
) -> list[dict[str, Any]]:
    """The storage locations of a lake, or the one that `location` is; `hidden` collections too.

    Raises:
        UsageError: there are none.
    """
    with Looker(settings) as looker:
        return [looker.look(url, hidden=hidden) for url in storage_locations(location)]


class Looker:
    """Looks again and again, and each time reads only what was written since.

    A context manager. For one thread at a time.
    """

    def __init__(self, settings: persist.Settings) -> None:
        self._settings = settings
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> "Looker":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was opened."""
        while self._clients:
            self._clients.popitem()[1].close()

    def locations(self, location: str) -> list[str]:
        """The storage locations there are by now; none is no error."""
        if location in self._clients or is_storage_location(location):
            return [location]
        below = [join(location, name) for name in children(location)]
        return [url for url in below if url in self._clients or is_storage_location(url)]

    def look(self, url: str, *, hidden: bool = False) -> dict[str, Any]:
        """How one storage location is."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = persist.open(url, hold=False, settings=self._settings)
        try:
            return self._look(client, hidden=hidden)
        except BaseException:
            # Whatever it was, the next look begins anew.
            self._clients.pop(url).close()
            raise

    def _look(self, client: Client, *, hidden: bool) -> dict[str, Any]:
        state = client.state
        now_ms = self._settings.clock.now_ms()
        holds = _holds(client.reader.machine.blob, state, now_ms)
        writer = state.writer
        full = disk_error(client.url)
        return {
            "location": client.url,
            "disk_error": full and {"message": str(full), "detail": full.detail, "hint": full.hint},
            "id": state.location,
            "epoch": state.epoch,
            "entries": state.seqno,
            "writer": None
            if writer is None
            else {
                "id": writer.id,
                "host": writer.host,
                "pid": writer.pid,
                "lives": lives(writer),
                "since": format_ms(writer.taken_ms),
            },
            "collections": [
                _collection(state.generations(name), holds) for name in state.listed(hidden=hidden)
            ],
            **_runners(client, state, now_ms),
            "holds": holds,
            "garbage_files": len(state.garbage),
        }


def _collection(generations: list[CollectionState], holds: list[dict[str, Any]]) -> dict[str, Any]:
    *older, collection = generations
    back = sorted(
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
        "held_back_by": back if collection.allowed > collection.since else [],
        "schema_version": collection.schemas[-1].version,
        "batches": len(collection.batches),
        "updates": sum(batch.rows for batch in collection.batches),
        "bytes": sum(batch.size for batch in collection.batches),
        "unsealed": any(batch.upper > collection.upper for batch in collection.batches),
        "error": _error(collection),
        "replaced": [
            {
                "id": each.id,
                "since": each.since,
                "upper": each.upper,
                "bytes": sum(batch.size for batch in each.batches),
                "error": _error(each),
            }
            for each in older
        ],
    }


def _runners(client: Client, state: State, now_ms: int) -> dict[str, list[dict[str, Any]]]:
    """What the sources and materializations of a storage location said of themselves last."""
    notes = {
        name: {"status": {}, **told}
        for name, told in source_states(client).items()
        if "status" in told or FAILURE in told
    }
    return {
        "sources": [
            {
                "source": name,
                **told["status"],
                "phase": _phase(told, state),
                **_lags(name, told, state, now_ms),
                "error": _task_error(told),
            }
            for name, told in notes.items()
            if not _materializes(told)
        ],
        "materializations": [
            {
                "materialization": name,
                **told["status"],
                "phase": (phase := _phase(told, state)),
                # The collections may have advanced since its last word.
                **({"lag_ms": None} if phase in ("stopped", PAUSED) else {}),
                "error": _task_error(told),
            }
            for name, told in notes.items()
            if _materializes(told)
        ],
    }


def _phase(told: dict[str, Any], state: State) -> str:
    """What a task does: what it said last, if it can still be so."""
    if told.get(PAUSED):
        return PAUSED
    if FAILURE in told or not _runs(state):
        return "stopped"
    return str(told["status"].get("phase", ""))


def _task_error(told: dict[str, Any]) -> dict[str, str] | None:
    """Return the error that stopped a task, else the one in its status."""
    error = told.get(FAILURE) or told["status"].get("error")
    if not error:
        return None
    if isinstance(error, str):
        return {"message": error, "detail": "", "hint": ""}
    return {name: error.get(name) or "" for name in ("message", "detail", "hint")}


def _runs(state: State) -> bool:
    """Whether somebody may write there; who was killed on this host does not."""
    return state.writer is not None and lives(state.writer)


def _materializes(told: dict[str, Any]) -> bool:
    """Return whether these are notes of a materialization.

    A source names its progress before anything else, and its status has the kind of its server.
    """
    if FAILURE in told:
        return bool(told[FAILURE]["kind"] == "materialization")
    return RECOVERY in told or (PROGRESS_KEY not in told and "kind" not in told["status"])


def _lags(source: str, told: dict[str, Any], state: State, now_ms: int) -> dict[str, int | None]:
    """Return the lag of a source; None where the position of its server is not known.

    The collections are complete up to the last tick. With a backlog that may be now, and the
    position that the source has reached is older.
    """
    status = told["status"]
    if _phase(told, state) in ("stopped", PAUSED) or status.get("connected") is False:
        return {name: None for name in LAGS if name in status or name == "lag_ms"}
    remap = state.named(f"{source}_remap")
    if remap is None or remap.upper == 0:
        return {"lag_ms": None}
    return {"lag_ms": max(0, now_ms - (remap.upper - 1), status.get("lag_ms") or 0)}


def _error(collection: CollectionState) -> dict[str, Any] | None:
    """The error that a reader of the latest time meets, or will."""
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
    found = []
    for id, (_, hold) in sorted(list_holds(blob).items()):
        if id not in state.expired:
            found.append(_hold(hold, state, now_ms))
    return found


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
