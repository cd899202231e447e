"""Tasks of the materializations in a pipeline file, each with its own recovery log."""

import random
import threading
from collections.abc import Callable
from pathlib import Path

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join
from penstock.errors import UsageError
from penstock.materialize.loop import MaterializationLoop
from penstock.materialize.runner import Runner
from penstock.materialize.teardown import drop
from penstock.pipeline import MaterializationSection, Pipeline, load
from penstock.supervisor import Supervisor, Task, writer_id

__all__ = ["Supervisor", "run", "tasks_of"]


def run(
    file: str | Path | Pipeline,
    *,
    jobs: Runner,
    once: bool = False,
    stop: threading.Event | None = None,
    on_start: Callable[[Supervisor], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    connector_host: str | None = None,
) -> None:
    """Run the materializations of `file` until `stop` is set.

    With `once`, return when the contents that the collections have at the start are materialized
    and acknowledged. `on_start` receives the supervisor before it runs, for access to its status.
    `connector_host` is the name of this host. It is needed if Spark tasks on other hosts connect
    to connectors that this process starts.

    Raises:
        PenstockError: the error of the first materialization that failed.
    """
    pipeline = file if isinstance(file, Pipeline) else load(file)
    tasks = tasks_of(
        pipeline, jobs=jobs, clock=clock, connector_host=lambda: connector_host, stop=stop
    )
    supervisor = Supervisor(tasks, stop, clock=clock)
    if on_start is not None:
        on_start(supervisor)
    supervisor.run(once=once)


def tasks_of(
    pipeline: Pipeline,
    *,
    jobs: Runner,
    clock: Clock = SYSTEM_CLOCK,
    connector_host: Callable[[], str | None] = lambda: None,
    allow_drop: bool = False,
    stop: threading.Event | None = None,
) -> list[Task]:
    """Return a task for each materialization of the pipeline.

    `stop` is set when the process stops. From then on, every wait for a connector has a limit.

    Raises:
        UsageError: the pipeline has no materializations.
    """
    if not pipeline.materializations:
        raise UsageError(
            "pipeline has no materializations",
            hint="Add one under materializations:.",
        )

    def task(name: str, section: MaterializationSection) -> Task:
        def build(client: persist.Client) -> MaterializationLoop:
            return MaterializationLoop(
                name,
                section,
                client,
                location=pipeline.location,
                jobs=jobs,
                tick_ms=pipeline.tick,
                clock=clock,
                rng=random.Random(),
                collections=pipeline.collections,
                sources=tuple(pipeline.sources),
                append_only=pipeline.append_only(),
                connector_host=connector_host(),
                allow_drop=allow_drop,
                process_stop=stop,
            )

        def drop_task(client: persist.Client, keep_target: bool) -> None:
            drop(name, section, client, pipeline.location, clock=clock, keep_target=keep_target)

        url = join(pipeline.location, name)
        return Task(name, "materialization", url, writer_id(pipeline), build, drop_task)

    return [task(name, section) for name, section in pipeline.materializations.items()]
