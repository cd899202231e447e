"""Supervised tasks for the sources of a pipeline file, one storage location each."""

import threading
from collections.abc import Callable
from pathlib import Path

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join, normal
from penstock.errors import UsageError
from penstock.failpoints import Failpoint, hit
from penstock.ingest.loop import IngestLoop
from penstock.ingest.progress_views import progress_views_in
from penstock.ingest.snapshot_loader import SPARK_BYTES, IngestJobs
from penstock.persist.lake import storage_locations_below
from penstock.persist.state_store import StateStore
from penstock.pipeline import Pipeline, SourceSection, load
from penstock.sources.source import Droppable, Source
from penstock.supervisor import Supervisor, Task, writer_id

__all__ = ["Supervisor", "drop", "run", "source_of", "tasks_of"]


def run(
    file: str | Path | Pipeline,
    *,
    once: bool = False,
    stop: threading.Event | None = None,
    jobs: IngestJobs | None = None,
    spark_bytes: int = SPARK_BYTES,
    on_start: Callable[[Supervisor], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Replicate every source of `file` until `stop` is set.

    With `once`, run until all data that was upstream at the start is durable. `on_start`
    receives the supervisor before it runs. `jobs` reads and compares tables of more than
    `spark_bytes`.

    Raises:
        PenstockError: the error of the first source that failed.
    """
    pipeline = file if isinstance(file, Pipeline) else load(file)
    tasks = tasks_of(pipeline, jobs=jobs, spark_bytes=spark_bytes, clock=clock)
    running = Supervisor(tasks, stop, clock=clock)
    if on_start is not None:
        on_start(running)
    running.run(once=once)


def tasks_of(
    pipeline: Pipeline,
    *,
    jobs: IngestJobs | None,
    spark_bytes: int = SPARK_BYTES,
    clock: Clock = SYSTEM_CLOCK,
    progress_of: Callable[[str], str] | None = None,
) -> list[Task]:
    """Return one task per source.

    `progress_of` returns the name of a source's progress relation, which the caller has
    reserved. Without it, the name is only compared with the names in use.

    Raises:
        UsageError: the file has no source.
    """
    if not pipeline.sources:
        raise UsageError(
            "pipeline has no sources", hint="Add one under sources:, as in the README."
        )
    taken = set() if progress_of is not None else _names_in(pipeline.location)
    taken.update(pipeline.sources)

    def task(name: str, section: SourceSection) -> Task:
        def build(client: persist.Client) -> IngestLoop:
            return IngestLoop(
                name,
                source_of(name, section, pipeline.location, clock),
                client,
                tick_ms=pipeline.tick,
                retain_ms=pipeline.retain,
                clock=clock,
                jobs=jobs,
                spark_bytes=spark_bytes,
                progress=section.progress if progress_of is None else progress_of(name),
                taken=() if progress_of is not None else taken,
            )

        def drop_source(client: persist.Client, _keep_target: bool) -> None:
            drop(client, name, source_of(name, section, pipeline.location, clock))

        url = join(pipeline.location, name)
        return Task(name, "source", url, writer_id(pipeline), build, drop_source)

    return [task(name, section) for name, section in pipeline.sources.items()]


def source_of(name: str, section: SourceSection, location: str, clock: Clock) -> Source:
    """Return the source of a section."""
    return section.kind.build(name, section.config, normal(location), clock)


def drop(client: persist.Client, name: str, source: Source) -> None:
    """Drop a source upstream, then destroy all its collections.

    In this order: as long as the state exists, an interrupted drop can be repeated.
    """
    if isinstance(source, Droppable):
        source.drop(StateStore(client, name))
    hit(Failpoint.SLOT_DROPPED)
    client.destroy(*client.collections(hidden=True))
    # This may be the last writer of the location, and only a writer deletes unused objects.
    client.compact()
    hit(Failpoint.DROP_DONE)


def _names_in(location: str) -> set[str]:
    """Return all names in use in a lake."""
    taken: set[str] = set()
    for url in storage_locations_below(location):
        with persist.open(url, hold=False) as client:
            taken.update(client.collections())
            taken.update(view.name for view in progress_views_in(client))
    return taken
