"""Status of a materialization, for the CLI and the status page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.materialize.building import Built
from penstock.materialize.lakeside import Ready
from penstock.materialize.rounds import Told
from penstock.persist.records import ErrorSpan
from penstock.progress.time import format_time

__all__ = ["Status"]

DELIVERING: Final = ("following", "storing")


@dataclass(slots=True)
class _Binding:
    collection: str
    resource: str = ""
    delta_updates: bool = False
    deletes: bool = True
    documents: int = 0
    bytes: int = 0


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
    bindings: list[_Binding] = field(default_factory=list[_Binding])

    def __post_init__(self) -> None:
        self.bindings = [_Binding(each) for each in self.collections]

    def told(self) -> Mapping[str, Any]:
        """Return the status as a JSON object."""
        return {
            "phase": "degraded" if self.degraded and self.phase in DELIVERING else self.phase,
            "upper": self.upper,
            "lag_ms": self.lag_ms,
            "waits_for": self._waits_for() or None,
            "waiting": {"step": self.step, "since_ms": self.step_since_ms}
            if self.overdue
            else None,
            "left_behind": list(self.degraded),
            "degraded": [
                {
                    "collection": name,
                    "time": span.lower,
                    "message": span.error.message,
                    "detail": span.error.detail,
                    "hint": span.error.hint,
                }
                for name, span in self.degraded.items()
            ],
            "documents": sum(each.documents for each in self.bindings),
            "bytes": sum(each.bytes for each in self.bindings),
            "transactions": self.transactions,
            "counted_since_ms": self.counted_since_ms,
            "last_transaction": dict(self.last),
            "bindings": [
                {
                    "collection": each.collection,
                    "resource": each.resource,
                    "delta_updates": each.delta_updates,
                    "deletes": each.deletes,
                    "documents": each.documents,
                    "bytes": each.bytes,
                }
                for each in self.bindings
            ],
            "error": self.error or None,
        }

    def _waits_for(self) -> str:
        if not self.overdue:
            return self.waits_for
        return f"{self.step} since {format_time(self.step_since_ms)}"

    def begin(self, step: str, now_ms: int) -> None:
        """Record the start of a step, or the end of the last step if `step` is empty."""
        self.step, self.step_since_ms, self.overdue = step, now_ms, False

    def wait(self, what: str) -> None:
        """Record the condition that the materialization waits for."""
        self.phase, self.waits_for = "waiting", what

    def build(self, built: Built) -> None:
        """Record the bindings that the connector has accepted."""
        applied = zip(self.bindings, built.spec.bindings, built.deletes, strict=True)
        for binding, spec, deletes in applied:
            binding.deletes = deletes
            binding.resource = ".".join(spec.resource_path)
            binding.delta_updates = spec.delta_updates

    def look(
        self,
        ready: Ready,
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

    def commit(self, told: Sequence[Told], upper: int) -> None:
        """Record a committed transaction, with the reports of all shards."""
        self.upper, self.error = upper, ""
        self.transactions += 1
        for each in told:
            for binding, count in zip(self.bindings, each.counts, strict=False):
                binding.documents += count.documents
                binding.bytes += count.bytes
        self.last = {
            "opened_ms": max(each.opened_ms for each in told),
            "read_ms": max(each.read_ms for each in told),
            "stored_ms": max(each.stored_ms for each in told),
            "committed_ms": max(each.committed_ms for each in told),
        }

    def settle(self, acknowledged_ms: int) -> None:
        """Record the acknowledgement of the last transaction."""
        self.phase = "following"
        self.last = {**self.last, "acknowledged_ms": acknowledged_ms}
