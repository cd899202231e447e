"""Supervisor of the tasks of one pipeline file, each in its own thread.

A failed task leaves the others running. If another process takes over one of the tasks, the
supervisor ends all of them, and takes no lock back.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Fenced
from penstock.persist.errors import Closed
from penstock.supervisor.request_queue import polling_requests
from penstock.supervisor.status import TaskStatus
from penstock.supervisor.supervised_task import SupervisedTask
from penstock.supervisor.task import Task

__all__ = ["Supervisor"]

JOIN_S: Final = 0.1


class Supervisor:
    """Supervised tasks, by name."""

    def __init__(
        self,
        tasks: Sequence[Task],
        stop: threading.Event | None = None,
        *,
        restarts: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        dropped: Callable[[Task], None] = lambda _: None,
    ) -> None:
        """Prepare the tasks; `run` runs them.

        Args:
            tasks: sources and materializations.
            stop: event that ends all tasks.
            restarts: restart a task after an error that may be transient, without limit.
            clock: source of time and waits.
            dropped: function that is called after a task was dropped.
        """
        self.stop = stop or threading.Event()
        self._clock = clock
        self.tasks = {
            task.name: SupervisedTask(
                task, process_stop=self.stop, restarts=restarts, clock=clock, dropped=dropped
            )
            for task in tasks
        }

    def status(self) -> Mapping[str, TaskStatus]:
        """Return the status of the tasks by name."""
        return {name: task.status() for name, task in self.tasks.items()}

    def collections(self) -> frozenset[str]:
        """Return the collections that exist in the storage locations of the tasks."""
        names: set[str] = set()
        for task in self.tasks.values():
            with suppress(Closed):
                if (client := task.client) is not None:
                    names.update(client.state.listed())
        return frozenset(names)

    def fenced(self) -> Fenced | None:
        """Return the error of a task that another process has taken over; None without one."""
        errors = [task.error for task in self.tasks.values()]
        return next((error for error in errors if isinstance(error, Fenced)), None)

    def unfinished(self) -> list[str]:
        """Return a sentence for each task that has not ended, with the reason of its wait."""
        lines = []
        for name, task in self.tasks.items():
            if task.is_over():
                continue
            waits_for = ""
            with suppress(Exception):  # The store that holds the status may be what hangs.
                waits_for = task.status().waits_for
            end = f" and waits for {waits_for.rstrip('.')}" if waits_for else ""
            lines.append(f'{task.task.kind.capitalize()} "{name}" has not ended{end}.')
        return lines

    def run(self, *, once: bool) -> None:
        """Run all tasks to their end; with `once`, sources before materializations.

        Raises:
            PenstockError: The error that ended a task, fatal errors first; with `once`, also
                the error of a table or binding that is incomplete.
        """
        waves: Sequence[Sequence[SupervisedTask]] = [
            [task for task in self.tasks.values() if task.task.kind == kind]
            for kind in ("source", "materialization")
        ]
        if not once:
            waves = [[*self.tasks.values()]]
        pollers = {name: partial(self._poll, task) for name, task in self.tasks.items()}
        with polling_requests(pollers, self._clock):
            for wave in waves:
                self._run_together(wave, once=once)
                if any(task.error is not None for task in wave):
                    break
        for task in sorted(self.tasks.values(), key=lambda task: not task.is_fatal):
            if task.error is not None:
                raise task.error
        for task in self.tasks.values():
            if task.incomplete is not None:
                raise task.incomplete

    def _poll(self, task: SupervisedTask, clean_up: bool) -> None:
        task.poll_requests(clean_up=clean_up, is_ending=self._is_ending)

    def _run_together(self, wave: Sequence[SupervisedTask], *, once: bool) -> None:
        threads = [
            threading.Thread(target=task.run_until_end, args=(once,), name=task.task.name)
            for task in wave
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(JOIN_S)
                if self.stop.is_set() or _all_over(wave):
                    for task in wave:
                        task.end()

    def _is_ending(self) -> bool:
        """Return whether the process is about to end, on request or without a running task."""
        return self.stop.is_set() or _all_over(self.tasks.values())


def _all_over(tasks: Iterable[SupervisedTask]) -> bool:
    return all(task.is_over() for task in tasks)
