"""The sources of a pipeline's file as tasks, each in a storage location of its own."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join
from penstock.errors import UsageError
from penstock.failpoints import Failpoint, hit
from penstock.ingest.loading import SPARK_BYTES, ManyTasks
from penstock.ingest.pipeline import Ingest
from penstock.ingest.relations import bindings_in
from penstock.persist.lake import storage_locations_below
from penstock.persist.state_store import Memory
from penstock.pipeline import Pipeline, load
from penstock.pipeline.file import SourceSection
from penstock.pipeline.running import Running, Task, writer_of
from penstock.sources.kafka.topics import kafka_source
from penstock.sources.postgres.source import PostgresSource
from penstock.sources.source import Source

__all__ = ["Running", "drop", "run", "source_of", "tasks_of"]

TASKS: Final = 2


def run(
    file: str | Path | Pipeline,
    *,
    once: bool = False,
    stop: threading.Event | None = None,
    many: ManyTasks | None = None,
    spark_bytes: int = SPARK_BYTES,
    told: Callable[[Running], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Follow every source of `file` until `stop` is set.

    With `once`, until all that was upstream at the start is durable. `told` is
    handed what runs, to look at while it does. `many` reads and compares tables of more than
    `spark_bytes`.

    Raises:
        PenstockError: what ended a source, of the first that was.
    """
    pipeline = file if isinstance(file, Pipeline) else load(file)
    tasks = tasks_of(pipeline, many=many, spark_bytes=spark_bytes, clock=clock)
    running = Running(tasks, stop, clock=clock)
    if told is not None:
        told(running)
    running.run(once=once)


def tasks_of(
    pipeline: Pipeline,
    *,
    many: ManyTasks | None,
    spark_bytes: int = SPARK_BYTES,
    clock: Clock = SYSTEM_CLOCK,
    progress_of: Callable[[str], str] | None = None,
) -> list[Task]:
    """What follows each source.

    `progress_of` returns the name of a source's progress relation, which its caller has
    taken. Without it, the name is only compared with those in use.

    Raises:
        UsageError: there is none.
    """
    if not pipeline.sources:
        raise UsageError(
            "pipeline has no sources", hint="Give it one under sources:, as in the README."
        )
    taken = set() if progress_of is not None else _names_in(pipeline.location)
    taken.update(pipeline.sources)

    def task(name: str, section: SourceSection) -> Task:
        def build(client: persist.Client) -> Ingest:
            return Ingest(
                name,
                source_of(name, section, pipeline.location, clock),
                client,
                tick_ms=pipeline.tick,
                retain_ms=pipeline.retain,
                clock=clock,
                chance=random.Random(),
                many=many,
                spark_bytes=spark_bytes,
                progress=section.progress if progress_of is None else progress_of(name),
                taken=() if progress_of is not None else taken,
            )

        def let_go(client: persist.Client, _keep_target: bool) -> None:
            drop(client, name, source_of(name, section, pipeline.location, clock))

        url = join(pipeline.location, name)
        return Task(name, "source", url, writer_of(pipeline), build, let_go)

    return [task(name, section) for name, section in pipeline.sources.items()]


def source_of(name: str, section: SourceSection, location: str, clock: Clock) -> Source:
    """What reads the upstream of a section."""
    if section.kafka is not None:
        return kafka_source(name, section.kafka, clock=clock)
    assert section.postgres is not None
    return PostgresSource(
        name,
        section.postgres,
        location=location,
        clock=clock,
        chance=random.Random(),
        tasks=TASKS,
    )


def drop(client: persist.Client, name: str, source: Source) -> None:
    """Let upstream forget a source, then destroy all it has in its storage location.

    In that order: while notes are there, a drop that was cut short can be done again.
    """
    source.drop(Memory(client, name))
    hit(Failpoint.SLOT_DROPPED)
    client.destroy(*client.collections(hidden=True))
    # Nobody may ever write here again, and only a writer deletes what is not needed.
    client.compact()
    hit(Failpoint.DROP_DONE)


def _names_in(location: str) -> set[str]:
    """All names that a lake has in use."""
    taken: set[str] = set()
    for url in storage_locations_below(location):
        with persist.open(url, hold=False) as client:
            taken.update(client.collections())
            taken.update(each.name for each in bindings_in(client))
    return taken
