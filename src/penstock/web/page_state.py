"""State of the status page, computed from the lake and the status of running tasks. Pure.

The status of a task in this process is newer than its status in the lake, and takes precedence. A
task that does not run in this process may run in another: a storage location with a live writer is
running.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.catalog import LocationStatus, StoredTask
from penstock.errors import PenstockError
from penstock.persist.state import END
from penstock.progress.time import describe_time
from penstock.supervisor.status import (
    ErrorStatus,
    Kind,
    MaterializationStatus,
    SourceStatus,
    State,
    TaskStatus,
)

__all__ = [
    "PageMaterialization",
    "PageSource",
    "PageState",
    "degraded_bindings",
    "outstanding_conditions",
    "state_of",
    "unhealthy_tasks",
]

DELIVERING: Final = ("following", "storing", "degraded")
HOLD_KEYS: Final = ("owner", "kind", "age_ms", "unchanged_ms")


@dataclass(frozen=True, slots=True)
class _PageTask:
    name: str
    state: State
    restarts: int
    error: ErrorStatus | None
    location: str | None
    """Storage location; None before it exists."""


@dataclass(frozen=True, slots=True)
class PageSource(_PageTask):
    """A source, with the lag of its collections behind now."""

    status: SourceStatus

    def to_json(self) -> dict[str, Any]:
        """Return the source as a JSON object."""
        return _task_json(self, self.status.to_json())


@dataclass(frozen=True, slots=True)
class PageMaterialization(_PageTask):
    """A materialization, with its lag behind the current uppers."""

    status: MaterializationStatus

    def to_json(self) -> dict[str, Any]:
        """Return the materialization as a JSON object."""
        status = self.status.to_json()
        # On the page, `transactions` is a list.
        status["transactions_total"] = status.pop("transactions", 0)
        return _task_json(self, status)


def _task_json(task: _PageTask, status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": task.name,
        **status,
        "state": task.state,
        "restarts": task.restarts,
        "error": None if task.error is None else task.error.to_json(),
        "location": task.location,
    }


@dataclass(frozen=True, slots=True)
class PageState:
    """Sources, collections, materializations and errors at one time."""

    now_ms: int
    sources: Sequence[PageSource]
    collections: Sequence[Mapping[str, Any]]
    materializations: Sequence[PageMaterialization]
    errors: Sequence[Mapping[str, str]]

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        return {
            "now_ms": self.now_ms,
            "sources": [source.to_json() for source in self.sources],
            "collections": list(self.collections),
            "materializations": [task.to_json() for task in self.materializations],
            "errors": list(self.errors),
        }


def state_of(
    locations: Sequence[LocationStatus],
    running: Mapping[str, TaskStatus],
    failures: Mapping[str, PenstockError],
    now_ms: int,
) -> PageState:
    """Return the state of a lake and of the tasks of this process.

    Args:
        locations: status of the storage locations that could be read.
        running: status of the tasks of this process, by name.
        failures: errors of the locations that could not be read, by URL.
        now_ms: the current time.
    """
    collections = [
        _collection(collection, location)
        for location in locations
        for collection in location.collections
    ]
    uppers = {collection["name"]: int(collection["upper"]) for collection in collections}
    sources = [_source(*task, now_ms) for task in _tasks(locations, running, "source")]
    materializations = [
        _materialization(*task, uppers) for task in _tasks(locations, running, "materialization")
    ]
    unread = [
        {"object": f'location "{url}"', **ErrorStatus.of(error).to_json()}
        for url, error in failures.items()
    ]
    full = [
        {"object": f'disk of location "{location.url}"', **location.disk_error.to_json()}
        for location in locations
        if location.disk_error is not None
    ]
    errors = [*unread, *full, *_errors(sources, collections, materializations)]
    return PageState(now_ms, sources, collections, materializations, errors)


def unhealthy_tasks(running: Mapping[str, TaskStatus]) -> list[str]:
    """Return the tasks that ended with an error and will not restart."""
    over = (State.STOPPED, State.ENDED)
    return [name for name, task in running.items() if task.state in over and task.error]


def outstanding_conditions(state: PageState) -> list[str]:
    """Return the outstanding conditions of readiness; empty if everything is ready.

    Paused tasks are ignored.
    """
    conditions = [
        f"{error['object']}: {error['message']}"
        for error in state.errors
        if error["object"].startswith("location ")
    ]
    for source in state.sources:
        name, status = f'source "{source.name}"', source.status
        loading = [table.name for table in status.tables if table.phase not in ("live", "errored")]
        if source.state == State.PAUSED:
            continue
        if source.state != State.RUNNING:
            conditions.append(f"{name} to run; it is {_state_and_reason(source)}")
        elif status.is_disconnected:
            conditions.append(f"{name} to connect: {status.disconnected_reason or 'no reason'}")
        elif status.as_of is None:
            conditions.append(f"{name} to begin; it is {status.phase or 'starting'}")
        elif loading:
            conditions.append(f"{name} to copy {', '.join(loading)}")
    for materialization in state.materializations:
        name, phase = f'materialization "{materialization.name}"', materialization.status.phase
        if materialization.state == State.PAUSED:
            continue
        if materialization.state != State.RUNNING:
            conditions.append(f"{name} to run; it is {_state_and_reason(materialization)}")
        elif phase not in DELIVERING or not materialization.status.upper:
            conditions.append(f"{name} to follow; it is {phase or 'starting'}")
    return conditions


def _state_and_reason(task: _PageTask) -> str:
    return str(task.state) if task.error is None else f"{task.state}: {task.error.message}"


def degraded_bindings(state: PageState) -> list[dict[str, Any]]:
    """Return the frozen bindings: materialization, collection, error time, error and remedy."""
    return [
        {"materialization": materialization.name, **frozen}
        for materialization in state.materializations
        for frozen in materialization.status.to_json().get("degraded", ())
    ]


_Task = tuple[str, LocationStatus | None, StoredTask | None, TaskStatus | None]
"""Name of a task, its storage location, its status in the lake and its status in this process."""


def _tasks(
    locations: Sequence[LocationStatus], running: Mapping[str, TaskStatus], kind: Kind
) -> list[_Task]:
    tasks: dict[str, _Task] = {
        task.name: (task.name, location, task, None)
        for location in locations
        for task in location.tasks
        if task.kind == kind
    }
    for name, status in running.items():
        if status.kind == kind:
            _, location, stored, _ = tasks.get(name, (name, None, None, None))
            tasks[name] = (name, location, stored, status)
    return [tasks[name] for name in sorted(tasks)]


def _supervision(
    location: LocationStatus | None, stored: StoredTask | None, live: TaskStatus | None
) -> tuple[State, int, ErrorStatus | None, str | None]:
    """Return state, restarts, error and URL of a task."""
    url = None if location is None else location.url
    if live is not None:
        return live.state, live.restarts, live.error, url
    assert location is not None
    assert stored is not None
    is_running = location.is_running and stored.status.phase != "stopped"
    return State.RUNNING if is_running else State.STOPPED, 0, stored.error, url


def _source(
    name: str,
    location: LocationStatus | None,
    stored: StoredTask | None,
    live: TaskStatus | None,
    now_ms: int,
) -> PageSource:
    state, restarts, error, url = _supervision(location, stored, live)
    status, lag_ms = SourceStatus(), None
    if stored is not None and isinstance(stored.status, SourceStatus):
        status, lag_ms = stored.status, stored.status.lag_ms
    if live is not None and live.loop is not None:
        status = live.source
    if state != State.RUNNING or status.is_disconnected:
        # Without a connection the upstream position, and so the lag, is not known.
        status, lag_ms = status.without_lag(), None
    elif lag_ms is None and status.as_of is not None:
        lag_ms = max(0, now_ms - status.as_of)
    status = status.updated(lag_ms=lag_ms)
    return PageSource(name, state, restarts, error, url, status)


def _materialization(
    name: str,
    location: LocationStatus | None,
    stored: StoredTask | None,
    live: TaskStatus | None,
    uppers: Mapping[str, int],
) -> PageMaterialization:
    state, restarts, error, url = _supervision(location, stored, live)
    status, lag_ms = MaterializationStatus(), None
    if stored is not None and isinstance(stored.status, MaterializationStatus):
        status, lag_ms = stored.status, stored.status.lag_ms
    if live is not None and live.loop is not None:
        status = live.materialization
    status = status.updated(lag_ms=_lag_ms(status, lag_ms, uppers))
    return PageMaterialization(name, state, restarts, error, url, status)


def _lag_ms(
    status: MaterializationStatus, stored_ms: int | None, uppers: Mapping[str, int]
) -> int | None:
    """Return the lag behind the collections; None before the first transaction.

    The stored lag is from the last inspection by the materialization, which may be old.
    """
    if not status.upper:
        return None
    reached = [
        upper
        for binding in status.bindings
        if binding.collection not in status.left_behind
        and (upper := uppers.get(binding.collection, END)) < END
    ]
    return max([stored_ms or 0, *([min(reached) - status.upper] if reached else [])])


def _collection(collection: Mapping[str, Any], location: LocationStatus) -> dict[str, Any]:
    name = collection["name"]
    return {
        **collection,
        "source": collection["owner"],
        "location": location.url,
        "holds": [
            {"since": hold["sinces"][name], **{key: hold[key] for key in HOLD_KEYS}}
            for hold in location.holds
            if name in hold["sinces"]
        ],
    }


def _errors(
    sources: Sequence[PageSource],
    collections: Sequence[Mapping[str, Any]],
    materializations: Sequence[PageMaterialization],
) -> Iterator[dict[str, str]]:
    for source in sources:
        if source.error is not None:
            yield _error("source", source.name, source.error)
    for collection in collections:
        if collection["error"]:
            error = ErrorStatus.parse(collection["error"]) or ErrorStatus()
            yield _error("collection", collection["name"], error)
    for materialization in materializations:
        if materialization.error is not None:
            yield _error("materialization", materialization.name, materialization.error)
    for materialization in materializations:
        for frozen in materialization.status.degraded:
            message = (
                f'bindings to collection "{frozen.collection}" are frozen at '
                f"{describe_time(frozen.time)}: {frozen.message}"
            )
            error = ErrorStatus(message, frozen.detail, frozen.hint)
            yield _error("materialization", materialization.name, error)
    errored = {collection["name"] for collection in collections if collection["error"]}
    for source in sources:
        for table in source.status.tables:
            if table.error_status is not None and table.collection not in errored:
                subject = f'table "{table.name}" of source "{source.name}"'
                yield _error("source", source.name, table.error_status, subject)
        if source.status.slot_warning:
            subject = f'slot "{source.status.slot}" of source "{source.name}"'
            yield _error("source", source.name, ErrorStatus(source.status.slot_warning), subject)


def _error(kind: str, name: str, error: ErrorStatus, subject: str = "") -> dict[str, str]:
    """Return an error with the object on the page that it belongs to."""
    return {
        "object": subject or f'{kind} "{name}"',
        "kind": kind,
        "name": name,
        **error.to_json(),
    }
