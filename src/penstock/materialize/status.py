"""Progress, counters and error of a materialization, and the status made of them."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.clock import Clock
from penstock.deadlines import answer_timeout_s
from penstock.errors import PenstockError
from penstock.materialize.commit_barrier import ShardReport
from penstock.materialize.inputs import Readiness
from penstock.materialize.spec_builder import BuiltSpec
from penstock.persist.records import ErrorSpan
from penstock.progress.time import format_time
from penstock.supervisor.status import (
    BindingStatus,
    FrozenBinding,
    MaterializationStatus,
    StepStatus,
)
from penstock.telemetry import fields, logger

__all__ = ["Status", "log_degraded", "report_overdue_steps"]

log = logger("materialize")

DELIVERING: Final = ("following", "storing")
POLL_S: Final = 0.2
"""Longest wait between two checks of the step in progress."""


@dataclass(slots=True)
class Status:
    """Progress, counters and error of a materialization."""

    collections: Sequence[str]
    counted_since_ms: int
    """Start of the counters of documents, bytes and transactions in this process."""

    phase: str = "starting"
    upper: int = 0
    """Frontier of the endpoint: it holds all changes below this time."""

    lag_ms: int | None = None
    """Lag of the endpoint behind its collections."""

    waits_for: str = ""
    step: str = ""
    """Request to the connector in progress, or empty."""

    step_since_ms: int = 0
    overdue: bool = False
    """True if the step takes longer than the answer deadline."""

    degraded: Mapping[str, ErrorSpan] = field(default_factory=dict[str, ErrorSpan])
    """Errored collections whose bindings are frozen (`leave_behind`)."""

    stopped: str = ""
    """Error of the collection that stopped the materialization, or empty."""

    error: str = ""
    transactions: int = 0
    last: Mapping[str, int] = field(default_factory=dict[str, int])
    bindings: list[BindingStatus] = field(default_factory=list[BindingStatus])

    def __post_init__(self) -> None:
        self.bindings = [BindingStatus(name) for name in self.collections]

    def snapshot(self) -> MaterializationStatus:
        """Return the status at this time."""
        return MaterializationStatus.of(
            phase="degraded" if self.degraded and self.phase in DELIVERING else self.phase,
            upper=self.upper,
            lag_ms=self.lag_ms,
            waits_for=self._waits_for() or None,
            waiting=StepStatus(self.step, self.step_since_ms) if self.overdue else None,
            left_behind=tuple(self.degraded),
            degraded=tuple(
                FrozenBinding(
                    name, span.lower, span.error.message, span.error.detail, span.error.hint
                )
                for name, span in self.degraded.items()
            ),
            documents=sum(binding.documents for binding in self.bindings),
            bytes=sum(binding.bytes for binding in self.bindings),
            transactions=self.transactions,
            counted_since_ms=self.counted_since_ms,
            last_transaction=dict(self.last),
            bindings=tuple(self.bindings),
            error=self.error or None,
        )

    def _waits_for(self) -> str:
        if not self.overdue:
            return self.waits_for
        return f"{self.step} since {format_time(self.step_since_ms)}"

    def begin(self, step: str, now_ms: int) -> None:
        """Record the start of a step, or the end of the last step if `step` is empty."""
        self.step, self.step_since_ms, self.overdue = step, now_ms, False

    def wait(self, condition: str) -> None:
        """Record the condition that the materialization waits for."""
        self.phase, self.waits_for = "waiting", condition

    def build(self, built: BuiltSpec) -> None:
        """Record the bindings that the connector has accepted."""
        applied = zip(self.bindings, built.spec.bindings, built.deletes, strict=True)
        self.bindings = [
            replace(
                binding,
                deletes=deletes,
                resource=".".join(spec.resource_path),
                delta_updates=spec.delta_updates,
            )
            for binding, spec, deletes in applied
        ]

    def update(
        self,
        ready: Readiness,
        reached: int,
        stopped: PenstockError | None = None,
        *,
        leaves_behind: bool,
    ) -> None:
        """Update the progress; `stopped` is the collection error that prevents a transaction."""
        self.upper = reached
        self.lag_ms = max(0, ready.upper - reached) if reached else None
        self.waits_for = ready.behind
        self.degraded = dict(ready.errored) if leaves_behind else {}
        self.stopped = "" if stopped is None else str(stopped)
        if stopped is not None:
            self.phase, self.error = "stopped", f"{stopped}. {stopped.hint}"
        elif ready.upper <= reached:
            self.phase, self.error = "following", ""

    def commit(self, reports: Sequence[ShardReport], upper: int) -> None:
        """Record a committed transaction, with the reports of all shards."""
        self.upper, self.error = upper, ""
        self.transactions += 1
        for report in reports:
            for number, count in enumerate(report.counts[: len(self.bindings)]):
                binding = self.bindings[number]
                self.bindings[number] = replace(
                    binding,
                    documents=binding.documents + count.documents,
                    bytes=binding.bytes + count.bytes,
                )
        self.last = {
            "opened_ms": max(report.opened_ms for report in reports),
            "read_ms": max(report.read_ms for report in reports),
            "stored_ms": max(report.stored_ms for report in reports),
            "committed_ms": max(report.committed_ms for report in reports),
        }

    def acknowledge(self, acknowledged_ms: int) -> None:
        """Record the acknowledgement of the last transaction."""
        self.phase = "following"
        self.last = {**self.last, "acknowledged_ms": acknowledged_ms}


@contextmanager
def report_overdue_steps(
    status: Status, clock: Clock, write_status: Callable[[], None], *, materialization: str
) -> Iterator[None]:
    """Mark a step of the block that takes longer than the answer deadline as overdue.

    `write_status` stores the status for other processes.
    """
    ended = threading.Event()
    deadline_ms = answer_timeout_s() * 1_000

    def watch() -> None:
        watched, since_ms = ("", 0), 0
        while not ended.wait(POLL_S):
            now_ms = clock.boot_ms()
            step = (status.step, status.step_since_ms)
            if step != watched:
                watched, since_ms = step, now_ms
            elif status.step and not status.overdue and now_ms - since_ms >= deadline_ms:
                status.overdue = True
                # The main thread reports errors of the store.
                with suppress(PenstockError):
                    write_status()

    thread = threading.Thread(target=watch, name=f"waits of {materialization}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def log_degraded(
    materialization: str, before: Mapping[str, ErrorSpan], after: Mapping[str, ErrorSpan]
) -> None:
    """Log the start and the end of errors of collections whose bindings are frozen."""
    for name, span in after.items():
        if before.get(name) != span:
            log.warning(
                "materialization degraded",
                extra=fields(
                    materialization=materialization,
                    collection=name,
                    time=span.lower,
                    error=span.error.message,
                    hint=span.error.hint,
                ),
            )
    for name in before.keys() - after.keys():
        log.info("binding resumes", extra=fields(materialization=materialization, collection=name))
