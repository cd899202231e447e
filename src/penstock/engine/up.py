"""A whole file, run: what it changes is applied, then its tasks are kept running.

    file ─► plan ─► refused? ─► dropped ─► catalogued ─► tasks: sources, materializations

One process and one Spark session for all of them. What fails is started again by itself,
or waits for a person, and leaves the others alone.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.catalog.listing import Listed, collections_of
from penstock.catalog.objects import (
    Object,
    Type,
    Wanted,
    catalogued,
    forget_object,
    known_objects,
)
from penstock.catalog.planning import Change, plan
from penstock.catalog.secrets import objects_without_secrets
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.engine.checking import checked
from penstock.engine.dropping import drop_object, leave_tables
from penstock.engine.kept.spark import KeptSession
from penstock.errors import PenstockError, UsageError
from penstock.ingest import running as ingest
from penstock.materialize import running as materialize
from penstock.persist.lake import is_storage_location
from penstock.persist.owners import lives, owner_of
from penstock.pipeline import Pipeline, load, load_written
from penstock.pipeline.running import Running, Task, told_of, writer_of
from penstock.telemetry import fields, logger

__all__ = ["BOTH", "run"]

log = logger("engine")

BOTH: Final[Sequence[Type]] = ("source", "materialization")
CATALOG_EVERY_MS: Final = 2_000


def run(
    file: str | Path,
    *,
    types: Sequence[Type] = BOTH,
    once: bool = False,
    stop: threading.Event | None = None,
    told: Callable[[Running], None] | None = None,
    changes: Callable[[Sequence[Change]], None] = lambda _: None,
    master: str | None = None,
    spark_starts: Callable[[], None] = lambda: None,
    allow_drop: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Follow what `file` says until `stop` is set.

    With `once`, until all that was upstream at the start has been materialized and
    acknowledged. `told` is handed what runs, to look at while it does; `changes` what the
    file changes, before it is done.

    Raises:
        UsageError: the file cannot be followed as it is.
        Fenced: another process follows it now.
        PenstockError: what ended a task, of the first that was, when all have.
    """
    pipeline, written = load(file), load_written(file)
    kept = KeptSession(master, starts=spark_starts)
    if "materialization" in types and pipeline.materializations:
        # While others answer; whoever needs it waits for it, and hears why it cannot start.
        threading.Thread(target=_warm, args=(kept,), name="spark", daemon=True).start()
    found = _agreed(pipeline, written, types, allow_drop=allow_drop, clock=clock)
    changes(found)
    tasks = _tasks(pipeline, kept, types, clock)
    _apply(pipeline, found, tasks, clock)
    catalog = _Following(pipeline, written, types, clock)
    catalog.look()
    for task in tasks:
        _tell_takeover(task)
    running = Running(tasks, stop, restarts=not once, clock=clock, dropped=catalog.forget)
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


def _tell_takeover(task: Task) -> None:
    """Say so if a process with our id still runs: it is about to be fenced, and to end."""
    other = owner_of(task.url) if is_storage_location(task.url) else None
    if other is not None and other.id == task.writer and lives(other):
        log.warning(
            "another process still runs this, and ends now: its place is taken",
            extra=fields(name=task.name, process=other.pid, host=other.host),
        )


def _agreed(
    pipeline: Pipeline,
    written: dict[str, Any],
    types: Sequence[Type],
    *,
    allow_drop: bool,
    clock: Clock,
) -> list[Change]:
    """What the file changes.

    Raises:
        UsageError: some of it cannot be done, or must be allowed first.
    """
    if not any(
        pipeline.sources if each == "source" else pipeline.materializations for each in types
    ):
        raise UsageError(
            "pipeline has nothing to run: it has no "
            + " and no ".join(f"{each}s" for each in types),
            hint="Give it one, as in the README.",
        )
    found = plan(known_objects(pipeline.location), written, types=types)
    changed = {(each.type, each.name) for each in found if each.action in ("create", "alter")}
    if any(each.type == "collection" for each in found):
        changed |= {("materialization", name) for name in pipeline.materializations}
    found += checked(pipeline, changed, clock=clock)
    if refused := [each for each in found if each.action == "refuse"]:
        raise UsageError(
            f'{refused[0].type} "{refused[0].name}" is refused: {refused[0].what}',
            detail=" ".join(f"Also: {each}." for each in refused[1:]),
            hint="See all that the file would change: penstock plan FILE",
        )
    if not allow_drop and (dropped := [each for each in found if each.action == "drop"]):
        raise UsageError(
            f"the file would {dropped[0]}",
            detail=" ".join(f"It would also {each}." for each in dropped[1:]),
            hint="If that is meant, say so: --allow-drop. Else put it back into the file.",
        )
    return found


def _tasks(
    pipeline: Pipeline, kept: KeptSession, types: Sequence[Type], clock: Clock
) -> list[Task]:
    tasks: list[Task] = []
    if "source" in types and pipeline.sources:
        tasks += ingest.tasks_of(pipeline, many=kept, clock=clock)
    if "materialization" in types and pipeline.materializations:
        tasks += materialize.tasks_of(
            pipeline, jobs=kept.jobs, clock=clock, connector_host=kept.connector_host
        )
    return tasks


def _apply(
    pipeline: Pipeline, changes: Sequence[Change], tasks: Sequence[Task], clock: Clock
) -> None:
    """Drop what is left out: what takes from collections before what fills them."""
    known = {(each.type, each.name): each for each in known_objects(pipeline.location)}
    running = {task.name for task in tasks}
    gone = {(each.type, each.name) for each in changes if each.action == "drop"}
    for each in sorted(gone):
        if each[1] in running:
            leave_tables(each[1], pipeline, clock=clock)
        else:
            drop_object(known[each], pipeline.location, writer=writer_of(pipeline), clock=clock)
            forget_object(known[each], pipeline.location, writer=writer_of(pipeline), clock=clock)


def _warm(kept: KeptSession) -> None:
    try:
        kept.get()
    except PenstockError as error:
        log.debug("Spark cannot start", extra=told_of("spark", error))


class _Following:
    """The catalog, kept in step with the file and with the collections that there are."""

    def __init__(
        self, pipeline: Pipeline, written: dict[str, Any], types: Sequence[Type], clock: Clock
    ) -> None:
        self._pipeline = pipeline
        self._written = written
        self._types = types
        self._clock = clock
        self._dropped: set[str] = set()
        self._seen: tuple[frozenset[Listed], int] | None = None

    def follow(self, over: threading.Event, running: Running) -> None:
        """Look whenever sources have made or destroyed something."""
        seen: frozenset[str] = frozenset()
        while not self._clock.wait(over, CATALOG_EVERY_MS):
            try:
                there = running.collections()
                if there != seen:
                    self.look()
                seen = there
            except PenstockError as error:
                log.warning("the catalog cannot be written", extra=told_of("catalog", error))

    def forget(self, task: Task) -> None:
        """A task was dropped."""
        self._dropped.add(task.name)
        self.look()

    def look(self) -> None:
        """Write down what has come and gone."""
        made = collections_of(self._pipeline.location)
        if (made, len(self._dropped)) != self._seen:
            catalogued(
                self._pipeline.location,
                lambda known: self._wanted(known, made),
                writer=writer_of(self._pipeline),
                clock=self._clock,
            )
            self._seen = (made, len(self._dropped))

    def _wanted(self, known: Sequence[Object], made: Iterable[Listed]) -> Iterable[Wanted]:
        for each in BOTH:
            for name, definition in self._defined(each, known).items():
                yield Wanted(name, each, definition)
        sources = self._defined("source", known)
        documents = objects_without_secrets(self._written.get("collections"), inherited=False)
        for listed in sorted(made):
            owner = listed.storage_location if listed.storage_location in sources else None
            if not listed.progress:
                yield Wanted(listed.name, "collection", documents.get(listed.name), owner)
            elif owner is not None:
                yield Wanted(listed.name, "source_progress", owner=owner)

    def _defined(self, of: Type, known: Sequence[Object]) -> Mapping[str, Any]:
        """The objects of a type: those of the file, if it is ours to say, else those there are."""
        if of not in self._types:
            return {each.name: each.definition for each in known if each.type == of}
        said = objects_without_secrets(self._written.get(f"{of}s"))
        return {name: each for name, each in said.items() if name not in self._dropped}
