"""Execution of a pipeline file: apply its changes, then run its tasks.

    file ─► plan ─► refused? ─► dropped ─► tasks: sources, materializations
                                             └─ lock ─► catalogued ─► followed

All tasks share one process and one Spark session. A failed task is restarted, or waits for a
person, and does not affect the other tasks. The process that holds the lock of an object writes the
definition of that object to the catalog. A process without the lock therefore writes nothing.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock import persist
from penstock.catalog.diff import Change
from penstock.catalog.inspect import list_collections
from penstock.catalog.namespace import (
    check_free,
    listed_names,
    names_of_source,
    progress_of_source,
    user_location_is_locked,
)
from penstock.catalog.objects import (
    Object,
    RequestedObject,
    Type,
    known_objects,
    remove_object,
    to_requested,
    update_catalog,
)
from penstock.catalog.redaction import objects_without_secrets
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join, normal
from penstock.engine.checking import changes_of, checked
from penstock.engine.dropping import drop_object, leave_tables
from penstock.engine.jars import kafka_jars
from penstock.engine.kept.spark import KeptSession
from penstock.errors import PenstockError, Problem, UsageError
from penstock.failpoints import Failpoint, hit
from penstock.ingest import tasks as ingest
from penstock.materialize import running as materialize
from penstock.persist.lake import is_storage_location
from penstock.persist.lock import check_lock, may_be_alive, owner_of
from penstock.pipeline import Pipeline, load, load_unresolved
from penstock.pipeline.supervisor import Loop, Supervisor, Task, error_fields, writer_id
from penstock.telemetry import fields, logger

__all__ = ["BOTH", "run"]

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
    told: Callable[[Supervisor], None] | None = None,
    changes: Callable[[Sequence[Change]], None] = lambda _: None,
    master: str | None = None,
    spark_starts: Callable[[], None] = lambda: None,
    allow_drop: bool = False,
    take_over: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> bool:
    """Run the tasks of `file` until `stop` is set; return whether there were any tasks.

    With `once`, run until all data that was upstream at the start is materialized and acknowledged.
    `told` receives the supervisor before the tasks start, for inspection while they run. `changes`
    receives the changes of the file before they are applied. A process of this host that runs an
    object of the file is replaced only with `take_over`.

    Raises:
        LockHeld: another process of this host runs an object of the file; nothing was changed.
        UsageError: the file cannot be run as it is.
        Fenced: another process has taken over.
        PenstockError: the error of the first task that failed, raised after all tasks have ended.
    """
    pipeline, written = load(file), load_unresolved(file)
    check_not_running(pipeline, types, take_over=take_over)
    found = changes_of(pipeline, written, types=types)
    if any(each.is_problem for each in found):
        _refuse(file, [*found, *_asked(pipeline, found, types, clock, stop)])
    _check_agreed(pipeline, found, types, allow_drop=allow_drop)
    topics = "source" in types and any(each.kafka for each in pipeline.sources.values())
    kept = KeptSession(master, jars=kafka_jars if topics else tuple, starts=spark_starts)
    if topics or ("materialization" in types and pipeline.materializations):
        # Start Spark while the servers answer. A task that needs the session waits for it, and
        # raises the error if the session cannot start.
        threading.Thread(target=_warm, args=(kept,), name="spark", daemon=True).start()
    found += _asked(pipeline, found, types, clock, stop)
    _refuse(file, found)
    changes(found)
    catalog = _Following(pipeline, written, clock)
    tasks = [
        replace(catalog.followed(task), take_over=take_over)
        for task in _tasks(pipeline, kept, types, catalog, clock, allow_drop=allow_drop, stop=stop)
    ]
    _apply(pipeline, found, tasks, clock, take_over=take_over)
    if not tasks:
        return False
    for task in tasks:
        _log_takeover(task)
    running = Supervisor(tasks, stop, restarts=not once, clock=clock, dropped=catalog.forget)
    if told is not None:
        told(running)
    over = threading.Event()
    following = threading.Thread(
        target=catalog.follow, args=(over, running), name="catalog", daemon=True
    )
    following.start()
    try:
        running.run(once=once)
    finally:
        over.set()
        following.join()
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
    pipeline: Pipeline, found: Sequence[Change], types: Sequence[Type], *, allow_drop: bool
) -> None:
    """Check that drops are allowed and that there is something to run.

    Raises:
        UsageError: a drop must be allowed first, or the file is empty.
    """
    dropped = [each for each in found if each.action == "drop"]
    if dropped and not allow_drop:
        raise UsageError(
            f"the file would {dropped[0]}",
            detail=" ".join(f"It would also {each}." for each in dropped[1:]),
            hint="If that is meant, say so: --allow-drop. Else put it back into the file.",
        )
    if not dropped and not any(
        pipeline.sources if each == "source" else pipeline.materializations for each in types
    ):
        raise UsageError(
            "pipeline has nothing to run: it has no "
            + " and no ".join(f"{each}s" for each in types),
            hint="Give it one, as in the README.",
        )


def _asked(
    pipeline: Pipeline,
    found: Sequence[Change],
    types: Sequence[Type],
    clock: Clock,
    stop: threading.Event | None,
) -> list[Change]:
    """Return the response of servers and connectors to the changed objects.

    An object that ran before may be unreachable for a while: its task restarts until the server is
    back. A new object must be reachable: otherwise only half of the file would be created.
    """
    changed = {(each.type, each.name) for each in found if each.action in ("create", "alter")}
    if "materialization" in types and any(each.type == "collection" for each in found):
        changed |= {("materialization", name) for name in pipeline.materializations}
    created = {(each.type, each.name) for each in found if each.action == "create"}
    return [
        replace(each, action="note", what=f"cannot be checked now: {each.what}")
        if each.action == "unreachable" and (each.type, each.name) not in created
        else each
        for each in checked(pipeline, changed, found, clock=clock, stop=stop)
    ]


def _refuse(file: str | Path, found: Sequence[Change]) -> None:
    """Raise an error with all problems, if there are any."""
    problems = [
        Problem(
            f'{each.type} "{each.name}" is {_REFUSED[each.action]}: {each.what}',
            each.detail,
            each.hint,
        )
        for each in found
        if each.is_problem
    ]
    if not problems:
        return
    first, *others = problems
    if not others:
        hint = first.hint or f"See all that the file would change: penstock plan {file}"
        raise UsageError(first.message, detail=first.detail, hint=hint)
    raise UsageError(
        f'pipeline file "{file}" cannot be run: {len(problems)} problems',
        problems=problems,
        hint=f"Nothing was changed. Check again after repairs: penstock plan {file}",
    )


def _tasks(
    pipeline: Pipeline,
    kept: KeptSession,
    types: Sequence[Type],
    catalog: "_Following",
    clock: Clock,
    *,
    allow_drop: bool,
    stop: threading.Event | None,
) -> list[Task]:
    tasks: list[Task] = []
    if "source" in types and pipeline.sources:
        tasks += ingest.tasks_of(
            pipeline, jobs=kept, clock=clock, progress_of=catalog.progress.__getitem__
        )
    if "materialization" in types and pipeline.materializations:
        tasks += materialize.tasks_of(
            pipeline,
            jobs=kept.jobs,
            clock=clock,
            connector_host=kept.connector_host,
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
    known = {(each.type, each.name): each for each in known_objects(pipeline.location)}
    running = {(task.kind, task.name) for task in tasks}
    gone = sorted({(each.type, each.name) for each in changes if each.action == "drop"})
    if not gone:
        return
    writer = writer_id(pipeline)
    for url in {join(pipeline.location, name) for _, name in gone} | {each.url for each in tasks}:
        if is_storage_location(url):
            check_lock(owner_of(url), where=normal(url), writer=writer, take_over=take_over)
    for kind, name in gone:
        if (kind, name) in running:
            leave_tables(name, pipeline, clock=clock)
        else:
            drop_object(known[kind, name], pipeline.location, writer=writer, clock=clock)
            remove_object(known[kind, name], pipeline.location, clock=clock)


def _warm(kept: KeptSession) -> None:
    try:
        kept.get()
    except PenstockError as error:
        log.debug("Spark cannot start", extra=error_fields("spark", error))


class _Following:
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

    def followed(self, task: Task) -> Task:
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
                there = running.collections()
                if there != seen or (ends and self._held):
                    self.look()
                seen = there
            except PenstockError as error:
                log.warning("the catalog cannot be written", extra=error_fields("catalog", error))

    def forget(self, task: Task) -> None:
        """Remove a dropped task from the catalog."""
        self._owed.add((task.kind, task.name))
        self._forget_owed()

    def _forget_owed(self) -> None:
        """Remove dropped tasks from the catalog.

        No other process removes them, so this runs again until it succeeds.
        """
        for each in known_objects(self._pipeline.location):
            if (each.type, each.name) in self._owed:
                with self._turn:
                    remove_object(each, self._pipeline.location, clock=self._clock)
        self._owed.clear()

    def look(self) -> None:
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
            wanted = {(each.type, each.name): each for each in to_requested(known)}
            for each in self._named(task, [*self._names_there(), *to_requested(known)]):
                before = wanted.get((each.type, each.name), each)
                wanted[each.type, each.name] = replace(each, definition=before.definition)
            wanted[task.kind, task.name] = RequestedObject(task.name, task.kind, definition)
            for each in wanted.values():
                ours = each.type == "collection" and self._is_ours(each)
                yield replace(each, definition=self._documents.get(each.name)) if ours else each

        self._write(defined)

    def _named(self, task: Task, taken: list[RequestedObject]) -> list[RequestedObject]:
        """Return the objects whose names a task reserves, and choose the name of its progress."""
        sources = self._pipeline.sources
        named = [RequestedObject(task.name, task.kind)]
        if task.kind == "source":
            named = names_of_source(task.name, sources[task.name])
        for each in named:
            check_free(each, taken)
            taken.append(each)
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

    def _names_there(self) -> list[RequestedObject]:
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
        stored = [each for each in to_requested(known) if each.type in BOTH]
        yield from stored
        sources = {each.name for each in stored if each.type == "source"}
        before = {each.name: each for each in known if each.type == "collection"}
        # SUBTLE: read before the listing. A job that no longer holds its lock has already created
        # the collection for which it reserved a name, and the listing finds that collection.
        locked = user_location_is_locked(self._pipeline.location)
        there = list_collections(self._pipeline.location)
        yield from self._not_created_yet(known, {each.name for each in there}, locked)
        for listed in sorted(there):
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
        self, known: Sequence[Object], there: set[str], locked: bool
    ) -> Iterable[RequestedObject]:
        """Yield reserved names whose objects the lake does not have yet."""
        for each in to_requested(known):
            if each.type in BOTH or each.name in there:
                continue
            if each.owner is None:
                kept = locked
            elif each.owner in self._built:
                section = self._pipeline.sources[each.owner]
                kept = each.name == self.progress[each.owner] or each.name in {
                    named.name for named in names_of_source(each.owner, section)
                }
            else:
                kept = True  # Its own process decides whether it is still needed.
            if kept:
                yield each

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
