"""A whole file, run: what it changes is applied, then its tasks are kept running.

    file ─► plan ─► refused? ─► dropped ─► tasks: sources, materializations
                                             └─ lock ─► catalogued ─► followed

One process and one Spark session for all of them. What fails is started again by itself,
or waits for a person, and leaves the others alone. What the file says of an object is
written down by who holds its lock, and so not by one that is refused it.
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
    """Follow what `file` says until `stop` is set; whether there was anything to follow.

    With `once`, until all that was upstream at the start has been materialized and
    acknowledged. `told` is handed what runs, to look at while it does; `changes` what the
    file changes, before it is done. Another process of this host that runs any of it is
    replaced only with `take_over`.

    Raises:
        LockHeld: such a process runs; nothing was changed.
        UsageError: the file cannot be followed as it is.
        Fenced: another process follows it now.
        PenstockError: what ended a task, of the first that was, when all have.
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
        # While others answer; whoever needs it waits for it, and hears why it cannot start.
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
    """Check that no other process of this host runs what the file says, under the same id.

    Raises:
        LockHeld: one does, and is not to be taken over from.
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
    """Return what servers and connectors would do about what has changed.

    An object that ran before may be unreachable for a while: it is restarted until it is
    back. One that is created must be reachable, so that nothing is made for half a file.
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
    """Drop what is left out: what takes from collections before what fills them.

    Raises:
        LockHeld: somebody else has one of the locks; then nothing is dropped.
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
    """The catalog, kept in step with tasks that run and with the collections that there are."""

    def __init__(self, pipeline: Pipeline, written: dict[str, Any], clock: Clock) -> None:
        self._pipeline = pipeline
        self._written = written
        self._clock = clock
        self._turn = threading.Lock()
        """One of our threads at a time: they would fence each other."""

        self._documents = objects_without_secrets(written.get("collections"), inherited=False)
        self._held: set[tuple[str, str]] = set()
        """Tasks that have had their lock, by kind and name."""

        self.progress: dict[str, str] = {}
        """By source, the name of its progress relation, once it is taken."""

        self._built: set[str] = set()
        """Sources whose objects have the names that the catalog has."""

        self._listed_first: list[RequestedObject] | None = None
        self._owed: set[tuple[str, str]] = set()
        """Tasks that were dropped and are to be forgotten."""

    def followed(self, task: Task) -> Task:
        """A task that is in the catalog as the file has it, before it does anything."""

        def build(client: persist.Client) -> Loop:
            self._take(task)
            hit(Failpoint.NAMES_TAKEN)
            loop = task.build(client)
            if task.kind == "source":
                self._built.add(task.name)
            return loop

        return replace(task, build=build)

    def follow(self, over: threading.Event, running: Supervisor) -> None:
        """Look whenever sources have made or destroyed something, and at the end."""
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
        """A task was dropped."""
        self._owed.add((task.kind, task.name))
        self._forget_owed()

    def _forget_owed(self) -> None:
        """Nobody else forgets what was dropped, so it is tried until it is done."""
        for each in known_objects(self._pipeline.location):
            if (each.type, each.name) in self._owed:
                with self._turn:
                    remove_object(each, self._pipeline.location, clock=self._clock)
        self._owed.clear()

    def look(self) -> None:
        """Write down which collections have come and gone."""
        self._write(self._listed)

    def _take(self, task: Task) -> None:
        """Write down what the file says of a task that has its lock, and take its names.

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
        """The objects whose names a task takes; the name of its progress is chosen here."""
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
        """What the lake had when the first task started: objects made since are in the catalog."""
        if self._listed_first is None:
            self._listed_first = listed_names(self._pipeline.location)
        return self._listed_first

    def _listed(self, known: Sequence[Object]) -> Iterable[RequestedObject]:
        """What is known, with the collections that there are, and names taken for others.

        SUBTLE: what is written was listed with the catalog's lock. Who wrote before has
        listed before, so what they found is found here, too.
        """
        stored = [each for each in to_requested(known) if each.type in BOTH]
        yield from stored
        sources = {each.name for each in stored if each.type == "source"}
        before = {each.name: each for each in known if each.type == "collection"}
        # SUBTLE: asked before the listing. A job that has its lock no more has created what it
        # took a name for, and the listing finds it.
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
        """Names that are taken, and whose objects the lake does not have yet."""
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
                kept = True  # Its own process knows whether it is still needed.
            if kept:
                yield each

    def _is_ours(self, collection: RequestedObject) -> bool:
        """Whether one of our tasks fills a collection, or takes from it."""
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
