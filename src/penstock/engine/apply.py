"""Execution of a pipeline file: apply its changes, then run its tasks.

    file ─► plan ─► preflight ─► drop ─► tasks: sources, materializations
                                           └─ lock ─► catalog entry ─► loop

All tasks share one process and one Spark session. A failed task is restarted, or waits for a
person, and does not affect the other tasks. The process that holds the lock of an object writes the
definition of that object to the catalog. A process without the lock therefore writes nothing.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock import ingest, persist
from penstock.catalog import (
    Change,
    Object,
    RequestedObject,
    Type,
    check_free,
    known_objects,
    list_collections,
    listed_names,
    names_of_source,
    objects_without_secrets,
    progress_of_source,
    remove_object,
    to_requested,
    update_catalog,
    user_location_is_locked,
)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join, normal
from penstock.engine.jars import kafka_jars
from penstock.engine.preflight import check_objects, plan_changes
from penstock.engine.shared_session.spark import SharedSession
from penstock.engine.teardown import drop_object, drop_removed_tables
from penstock.errors import PenstockError, Problem, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.materialize import tasks as materialize
from penstock.persist.lake import is_storage_location
from penstock.persist.lock import check_lock, may_be_alive, owner_of
from penstock.pipeline import Pipeline, load, load_unresolved
from penstock.supervisor import Loop, Supervisor, Task, error_fields, writer_id
from penstock.telemetry import fields, logger

__all__ = ["BOTH", "check_not_running", "run"]

log = logger("engine")

BOTH: Final[Sequence[Type]] = ("source", "materialization")
CATALOG_EVERY_MS: Final = 2_000
_REFUSED: Final = {"refuse": "refused", "unreachable": "unreachable"}


def run(
    file: str | Path,
    *,
    types: Sequence[Type] = BOTH,
    once: bool = False,
    stop: threading.Event | None = None,
    on_start: Callable[[Supervisor], None] | None = None,
    on_changes: Callable[[Sequence[Change]], None] = lambda _: None,
    master: str | None = None,
    spark_starts: Callable[[], None] = lambda: None,
    allow_drop: bool = False,
    take_over: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> bool:
    """Run the tasks of `file` until `stop` is set; return whether there were any tasks.

    With `once`, run until all data that was upstream at the start is materialized and acknowledged.
    `on_start` receives the supervisor before the tasks start, for inspection while they run.
    `on_changes` receives the changes of the file before they are applied. A process of this host
    that runs an object of the file is replaced only with `take_over`.

    Raises:
        LockHeld: another process of this host runs an object of the file; nothing was changed.
        UsageError: the file cannot be run as it is.
        Fenced: another process has taken over.
        PenstockError: the error of the first task that failed, raised after all tasks have ended.
    """
    pipeline, written = load(file), load_unresolved(file)
    check_not_running(pipeline, types, take_over=take_over)
    changes = plan_changes(pipeline, written, types=types)
    if any(change.is_problem for change in changes):
        _refuse(file, [*changes, *_check_changed(pipeline, changes, types, clock, stop)])
    _check_agreed(pipeline, changes, types, allow_drop=allow_drop)
    topics = "source" in types and any(
        section.kind.spark_format == "kafka" for section in pipeline.sources.values()
    )
    session = SharedSession(
        master, jars=kafka_jars if topics else tuple, starts=spark_starts, stop=stop
    )
    if topics or ("materialization" in types and pipeline.materializations):
        # Start Spark while the servers answer. A task that needs the session waits for it, and
        # raises the error if the session cannot start.
        threading.Thread(target=_warm, args=(session,), name="spark", daemon=True).start()
    changes += _check_changed(pipeline, changes, types, clock, stop)
    _refuse(file, changes)
    on_changes(changes)
    catalog = _CatalogUpdates(pipeline, written, clock)
    tasks = [
        replace(catalog.with_catalog(task), take_over=take_over)
        for task in _tasks(
            pipeline, session, types, catalog, clock, allow_drop=allow_drop, stop=stop
        )
    ]
    _apply(pipeline, changes, tasks, clock, take_over=take_over)
    if not tasks:
        return False
    for task in tasks:
        _log_takeover(task)
    supervisor = Supervisor(tasks, stop, restarts=not once, clock=clock, dropped=catalog.forget)
    if on_start is not None:
        on_start(supervisor)
    ended = threading.Event()
    updates = threading.Thread(
        target=catalog.follow, args=(ended, supervisor), name="catalog", daemon=True
    )
    updates.start()
    try:
        supervisor.run(once=once)
    finally:
        ended.set()
        updates.join()
    return True


def check_not_running(pipeline: Pipeline, types: Sequence[Type], *, take_over: bool) -> None:
    """Check that no other process of this host runs an object of the file with the same writer id.

    Raises:
        LockHeld: such a process exists, and `take_over` is not set.
    """
    writer = writer_id(pipeline)
    names = {
        *(pipeline.sources if "source" in types else ()),
        *(pipeline.materializations if "materialization" in types else ()),
    }
    for name in sorted(names):
        url = join(pipeline.location, name)
        held = owner_of(url) if is_storage_location(url) else None
        if held is not None and held.id == writer:
            check_lock(held, where=normal(url), writer=writer, take_over=take_over)


def _log_takeover(task: Task) -> None:
    held = owner_of(task.url) if is_storage_location(task.url) else None
    if held is not None and held.id == task.writer and may_be_alive(held):
        log.warning(
            "taking over from another process",
            extra=fields(name=task.name, pid=held.pid, host=held.host),
        )


def _check_agreed(
    pipeline: Pipeline, changes: Sequence[Change], types: Sequence[Type], *, allow_drop: bool
) -> None:
    """Check that drops are allowed and that there is something to run.

    Raises:
        UsageError: a drop must be allowed first, or the file is empty.
    """
    dropped = [change for change in changes if change.action == "drop"]
    if dropped and not allow_drop:
        raise UsageError(
            f"the file would {dropped[0]}",
            detail=" ".join(f"It would also {change}." for change in dropped[1:]),
            hint="Run with --allow-drop to drop it, or put it back into the file.",
        )
    if not dropped and not any(
        pipeline.sources if object_type == "source" else pipeline.materializations
        for object_type in types
    ):
        raise UsageError(
            "pipeline has nothing to run: it has no "
            + " and no ".join(f"{object_type}s" for object_type in types),
            hint="Add one, as in the README.",
        )


def _check_changed(
    pipeline: Pipeline,
    changes: Sequence[Change],
    types: Sequence[Type],
    clock: Clock,
    stop: threading.Event | None,
) -> list[Change]:
    """Return the response of servers and connectors to the changed objects.

    An object that ran before may be unreachable for a while: its task restarts until the server is
    back. A new object must be reachable: otherwise only half of the file would be created.
    """
    changed = {
        (change.type, change.name) for change in changes if change.action in ("create", "alter")
    }
    if "materialization" in types and any(change.type == "collection" for change in changes):
        changed |= {("materialization", name) for name in pipeline.materializations}
    created = {(change.type, change.name) for change in changes if change.is_new}
    return [
        replace(change, action="note", what=f"cannot be checked now: {change.what}")
        if change.action == "unreachable" and (change.type, change.name) not in created
        else change
        for change in check_objects(pipeline, changed, changes, clock=clock, stop=stop)
    ]


def _refuse(file: str | Path, changes: Sequence[Change]) -> None:
    """Raise an error with all problems, if there are any."""
    problems = [
        Problem(
            f'{change.type} "{change.name}" is {_REFUSED[change.action]}: {change.what}',
            change.detail,
            change.hint,
        )
        for change in changes
        if change.is_problem
    ]
    if not problems:
        return
    first, *others = problems
    if not others:
        hint = first.hint or f"List all changes of the file: penstock plan {file}"
        raise UsageError(first.message, detail=first.detail, hint=hint)
    raise UsageError(
        f'pipeline file "{file}" cannot be run: {len(problems)} problems',
        problems=problems,
        hint=f"Nothing was changed. Check again after repairs: penstock plan {file}",
    )


def _tasks(
    pipeline: Pipeline,
    session: SharedSession,
    types: Sequence[Type],
    catalog: "_CatalogUpdates",
    clock: Clock,
    *,
    allow_drop: bool,
    stop: threading.Event | None,
) -> list[Task]:
    tasks: list[Task] = []
    if "source" in types and pipeline.sources:
        tasks += ingest.tasks_of(
            pipeline, jobs=session, clock=clock, progress_of=catalog.progress.__getitem__
        )
    if "materialization" in types and pipeline.materializations:
        tasks += materialize.tasks_of(
            pipeline,
            jobs=session.jobs,
            clock=clock,
            connector_host=session.connector_host,
            allow_drop=allow_drop,
            stop=stop,
        )
    return tasks


def _apply(
    pipeline: Pipeline,
    changes: Sequence[Change],
    tasks: Sequence[Task],
    clock: Clock,
    *,
    take_over: bool,
) -> None:
    """Drop the objects that the file omits, materializations before the sources that feed them.

    Raises:
        LockHeld: another process holds one of the locks; nothing is dropped.
    """
    known = {(entry.type, entry.name): entry for entry in known_objects(pipeline.location)}
    running = {(task.kind, task.name) for task in tasks}
    dropped = sorted({(change.type, change.name) for change in changes if change.action == "drop"})
    if not dropped:
        return
    writer = writer_id(pipeline)
    for url in {join(pipeline.location, name) for _, name in dropped} | {
        task.url for task in tasks
    }:
        if is_storage_location(url):
            check_lock(owner_of(url), where=normal(url), writer=writer, take_over=take_over)
    for kind, name in dropped:
        if (kind, name) in running:
            drop_removed_tables(name, pipeline, clock=clock)
        else:
            drop_object(known[kind, name], pipeline.location, writer=writer, clock=clock)
            remove_object(known[kind, name], pipeline.location, clock=clock)


def _warm(session: SharedSession) -> None:
    try:
        session.get()
    except PenstockError as error:
        log.debug("Spark cannot start", extra=error_fields("spark", error))


class _CatalogUpdates:
    """Catalog updates for the running tasks and for the collections of the lake."""

    def __init__(self, pipeline: Pipeline, written: dict[str, Any], clock: Clock) -> None:
        self._pipeline = pipeline
        self._written = written
        self._clock = clock
        self._turn = threading.Lock()
        """Held for each catalog write: two threads of this process would fence each other."""

        self._documents = objects_without_secrets(written.get("collections"), inherited=False)
        self._held: set[tuple[str, str]] = set()
        """Tasks that have acquired their lock, by kind and name."""

        self.progress: dict[str, str] = {}
        """Name of the progress relation of each source, after the source has reserved that name."""

        self._built: set[str] = set()
        """Sources whose objects have the names that the catalog has."""

        self._listed_first: list[RequestedObject] | None = None
        self._owed: set[tuple[str, str]] = set()
        """Dropped tasks that are still in the catalog, by kind and name."""

    def with_catalog(self, task: Task) -> Task:
        """Return a task that writes its definition to the catalog before it does anything else."""

        def build(client: persist.Client) -> Loop:
            self._take(task)
            hit(Failpoint.NAMES_TAKEN)
            loop = task.build(client)
            if task.kind == "source":
                self._built.add(task.name)
            return loop

        return replace(task, build=build)

    def follow(self, over: threading.Event, running: Supervisor) -> None:
        """Update the catalog when sources create or destroy collections, and once at the end."""
        seen: frozenset[str] = frozenset()
        ends = False
        while not ends:
            ends = self._clock.wait(over, CATALOG_EVERY_MS)
            try:
                if self._owed:
                    self._forget_owed()
                collections = running.collections()
                if collections != seen or (ends and self._held):
                    self.update_collections()
                seen = collections
            except PenstockError as error:
                log.warning("catalog write failed", extra=error_fields("catalog", error))

    def forget(self, task: Task) -> None:
        """Remove a dropped task from the catalog."""
        self._owed.add((task.kind, task.name))
        self._forget_owed()

    def _forget_owed(self) -> None:
        """Remove dropped tasks from the catalog.

        No other process removes them, so this runs again until it succeeds.
        """
        for entry in known_objects(self._pipeline.location):
            if (entry.type, entry.name) in self._owed:
                with self._turn:
                    remove_object(entry, self._pipeline.location, clock=self._clock)
        self._owed.clear()

    def update_collections(self) -> None:
        """Write the collections that were created or destroyed to the catalog."""
        self._write(self._listed)

    def _take(self, task: Task) -> None:
        """Write the definition of a task that holds its lock to the catalog, and reserve its names.

        Raises:
            UsageError: another object has one of the names.
        """
        definition = objects_without_secrets(self._written[f"{task.kind}s"])[task.name]
        with self._turn:
            self._held.add((task.kind, task.name))

        def defined(known: Sequence[Object]) -> Iterable[RequestedObject]:
            requested = {(entry.type, entry.name): entry for entry in to_requested(known)}
            for entry in self._named(task, [*self._first_names(), *to_requested(known)]):
                before = requested.get((entry.type, entry.name), entry)
                requested[entry.type, entry.name] = replace(entry, definition=before.definition)
            requested[task.kind, task.name] = RequestedObject(task.name, task.kind, definition)
            for entry in requested.values():
                ours = entry.type == "collection" and self._is_ours(entry)
                yield replace(entry, definition=self._documents.get(entry.name)) if ours else entry

        self._write(defined)

    def _named(self, task: Task, taken: list[RequestedObject]) -> list[RequestedObject]:
        """Return the objects whose names a task reserves, and choose the name of its progress."""
        sources = self._pipeline.sources
        named = [RequestedObject(task.name, task.kind)]
        if task.kind == "source":
            named = names_of_source(task.name, sources[task.name])
        for entry in named:
            check_free(entry, taken)
            taken.append(entry)
        if task.kind == "source":
            if sources[task.name].progress is None:
                taken += [
                    RequestedObject(name, "materialization")
                    for name in self._pipeline.materializations
                ]
                for name, section in sources.items():
                    taken += names_of_source(name, section)
                named.append(progress_of_source(task.name, taken))
            self.progress[task.name] = named[-1].name
        return named

    def _first_names(self) -> list[RequestedObject]:
        """Return the names that the lake had at the start of the first task.

        Objects created since then are in the catalog.
        """
        if self._listed_first is None:
            self._listed_first = listed_names(self._pipeline.location)
        return self._listed_first

    def _listed(self, known: Sequence[Object]) -> Iterable[RequestedObject]:
        """Yield the known objects, the collections of the lake and the names reserved for others.

        SUBTLE: the listing happens under the lock of the catalog. An earlier writer listed earlier,
        so this listing contains every object that the earlier writer found.
        """
        stored = [entry for entry in to_requested(known) if entry.type in BOTH]
        yield from stored
        sources = {entry.name for entry in stored if entry.type == "source"}
        before = {entry.name: entry for entry in known if entry.type == "collection"}
        # SUBTLE: read before the listing. A job that no longer holds its lock has already created
        # the collection whose name it reserved, and the listing finds that collection.
        locked = user_location_is_locked(self._pipeline.location)
        listing = list_collections(self._pipeline.location)
        yield from self._not_created_yet(known, {entry.name for entry in listing}, locked)
        for listed in sorted(listing):
            owner = listed.storage_location if listed.storage_location in sources else None
            if not listed.progress:
                made = RequestedObject(listed.name, "collection", owner=owner)
                documents = before[made.name].definition if made.name in before else None
                if made.name not in before and self._is_ours(made):
                    documents = self._documents.get(made.name)
                yield replace(made, definition=documents)
            elif owner is not None:
                yield RequestedObject(listed.name, "source_progress", owner=owner)

    def _not_created_yet(
        self, known: Sequence[Object], existing: set[str], locked: bool
    ) -> Iterable[RequestedObject]:
        """Yield reserved names whose objects the lake does not have yet."""
        for entry in to_requested(known):
            if entry.type in BOTH or entry.name in existing:
                continue
            if entry.owner is None:
                is_reserved = locked
            elif entry.owner in self._built:
                section = self._pipeline.sources[entry.owner]
                is_reserved = entry.name == self.progress[entry.owner] or entry.name in {
                    named.name for named in names_of_source(entry.owner, section)
                }
            else:
                is_reserved = True  # Its own process decides whether it is still needed.
            if is_reserved:
                yield entry

    def _is_ours(self, collection: RequestedObject) -> bool:
        """Return whether a task of this process writes or reads a collection."""
        materializations = self._pipeline.materializations
        return ("source", collection.owner) in self._held or any(
            binding.collection == collection.name
            for kind, name in self._held
            if kind == "materialization"
            for binding in materializations[name].bindings
        )

    def _write(self, change: Callable[[Sequence[Object]], Iterable[RequestedObject]]) -> None:
        with self._turn:
            update_catalog(self._pipeline.location, change, clock=self._clock)
