"""Supervised tasks and their loops.

A task is a source or a materialization of the pipeline file. Its loop does the work. The
supervisor runs the loop, and decides from its errors whether the task resumes, restarts or stops.
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import xxhash

from penstock import persist
from penstock.durable import normal
from penstock.errors import PenstockError
from penstock.persist.requests import Request
from penstock.pipeline import Pipeline
from penstock.supervisor.status import Kind, LoopStatus
from penstock.telemetry import fields

__all__ = [
    "Kind",
    "Loop",
    "LoopRequests",
    "RequestHandler",
    "Task",
    "error_fields",
    "writer_id",
]


class Loop(Protocol):
    """A loop that runs until it is stopped, and raises its errors."""

    @property
    def commits(self) -> int:
        """Return the number of ticks or transactions that this loop has committed."""
        ...

    @property
    def is_resumable(self) -> bool:
        """Return whether a run with `once` may be resumed after a transient error.

        A server that never answered may not exist.
        """
        ...

    @property
    def step(self) -> str:
        """Return the step at which the last run failed, for the log."""
        ...

    def run(self, stop: threading.Event, *, once: bool) -> None:
        """Run until `stop` is set; with `once`, up to the current end of the input.

        A later call continues from the durable position. If `stop` is set, the call only
        records the end in the status.
        """
        ...

    def status(self) -> LoopStatus:
        """Return the current status."""
        ...


class LoopRequests(Protocol):
    """Requests of other processes that a loop handles itself."""

    def loop_requests(self) -> Sequence[Request]:
        """Return the requests, oldest first, until each has a response."""
        ...

    def respond(
        self,
        request: Request,
        error: PenstockError | None = None,
        *,
        left: Mapping[str, str] | None = None,
        corrected_rows: int | None = None,
    ) -> None:
        """Respond that a request was executed, except for the tables `left`, or with an error."""
        ...


@runtime_checkable
class RequestHandler(Protocol):
    """A loop that handles requests at its ticks."""

    def use_requests(self, requests: LoopRequests, /) -> None:
        """Handle these requests in every later run."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A source or a materialization, and the functions that run and drop it."""

    name: str
    kind: Kind
    url: str
    """URL of its storage location."""

    writer: str
    build: Callable[[persist.Client], Loop]
    drop: Callable[[persist.Client, bool], None]
    """Drop everything it created outside its storage location; if True, except its resources."""

    take_over: bool = False
    """Replace a process of this host that runs the task."""

    @property
    def lake(self) -> str:
        """Return the URL of the lake."""
        return self.url.removesuffix(f"/{self.name}")


def error_fields(name: str, error: BaseException, **others: object) -> dict[str, Any]:
    """Return the log fields of an error of a task."""
    detail = getattr(error, "detail", "")
    return fields(name=name, error=str(error), **({"detail": detail} if detail else {}), **others)


def writer_id(pipeline: Pipeline) -> str:
    """Return the writer id: the id in the file, or one derived from the lake and the host."""
    if pipeline.writer is not None:
        return pipeline.writer
    lake = xxhash.xxh64_hexdigest(normal(pipeline.location).encode())[:8]
    return f"{lake}-{socket.gethostname()}"
