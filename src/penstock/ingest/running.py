"""All sources of a pipeline's file, each in a thread and a storage location of its own.

A source that fails leaves the others running; its error is told when all have
stopped. A writer that was fenced ends everything, and takes nothing back.
"""

import random
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join, normal
from penstock.errors import Fenced, PenstockError, UsageError
from penstock.ingest.loading import SPARK_BYTES, ManyTasks
from penstock.ingest.pipeline import Ingest
from penstock.ingest.relations import bindings_in
from penstock.persist.lake import storage_locations_below
from penstock.pipeline import Pipeline, load
from penstock.sources.postgres.source import PostgresSource
from penstock.telemetry import fields, logger

__all__ = ["Running", "run", "writer_of"]

log = logger("ingest")

TASKS: Final = 2


def run(
    file: str | Path | Pipeline,
    *,
    once: bool = False,
    stop: threading.Event | None = None,
    many: ManyTasks | None = None,
    spark_bytes: int = SPARK_BYTES,
    told: Callable[["Running"], None] | None = None,
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
    if not pipeline.sources:
        raise UsageError(
            "pipeline has no sources", hint="Give it one under sources:, as in the README."
        )
    taken = _names_in(pipeline.location)
    running = Running(stop or threading.Event())
    with ExitStack() as stack:
        for name, section in pipeline.sources.items():
            client = stack.enter_context(
                persist.open(join(pipeline.location, name), writer=writer_of(pipeline))
            )
            source = PostgresSource(
                name,
                section.postgres,
                location=pipeline.location,
                clock=clock,
                chance=random.Random(),
                tasks=TASKS,
            )
            running.sources[name] = Ingest(
                name,
                source,
                client,
                tick_ms=pipeline.tick,
                retain_ms=pipeline.retain,
                clock=clock,
                chance=random.Random(),
                many=many,
                spark_bytes=spark_bytes,
                progress=section.progress,
                taken=taken,
            )
        if told is not None:
            told(running)
        running.run(once=once)


@dataclass(slots=True)
class Running:
    """What runs."""

    stop: threading.Event
    sources: dict[str, Ingest] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)

    def status(self) -> Mapping[str, Any]:
        """For people, by source."""
        return {name: ingest.status() for name, ingest in self.sources.items()}

    def run(self, *, once: bool) -> None:
        """Run all sources to their end."""
        threads = [
            threading.Thread(target=self._follow, args=(name, once), name=f"ingest {name}")
            for name in self.sources
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in self.errors.values():
            raise error

    def _follow(self, name: str, once: bool) -> None:
        ingest = self.sources[name]
        try:
            ingest.run(self.stop, once=once)
        except BaseException as error:  # noqa: BLE001 - the thread's door: told at the end
            self.errors[name] = error
            if isinstance(error, Fenced) or not isinstance(error, PenstockError):
                self.stop.set()
            else:
                log.error("source has stopped", extra=fields(source=name, error=str(error)))


def _names_in(location: str) -> set[str]:
    """All names that a lake has in use."""
    taken: set[str] = set()
    for url in storage_locations_below(location):
        with persist.open(url, hold=False) as client:
            taken.update(client.collections())
            taken.update(each.name for each in bindings_in(client))
    return taken


def writer_of(pipeline: Pipeline) -> str:
    """The reentrance id: what the file says, else one of this lake and host."""
    if pipeline.writer is not None:
        return pipeline.writer
    lake = xxhash.xxh64_hexdigest(normal(pipeline.location).encode())[:8]
    return f"{lake}-{socket.gethostname()}"
