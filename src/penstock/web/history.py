"""Recent samples of the status, so a chart has data when the page is opened.

The samples are in memory and bounded: ten minutes of samples, a hundred transactions.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.web.page_state import PageMaterialization, PageState

__all__ = ["History"]

SAMPLES: Final = 600
TRANSACTIONS: Final = 100
PHASES: Final = ("opened_ms", "read_ms", "stored_ms", "committed_ms", "acknowledged_ms")


def _samples() -> deque[list[int | None]]:
    return deque(maxlen=SAMPLES)


def _transactions() -> deque[dict[str, Any]]:
    return deque(maxlen=TRANSACTIONS)


@dataclass(slots=True)
class _Task:
    samples: deque[list[int | None]] = field(default_factory=_samples)
    transactions: deque[dict[str, Any]] = field(default_factory=_transactions)
    counted: int | None = None
    documents: int = 0


class History:
    """Samples by kind and name. Not thread-safe."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], _Task] = {}

    def sample(self, now_ms: int, state: PageState) -> None:
        """Add a sample of each task in `state`, and drop tasks that it no longer contains."""
        tasks: dict[tuple[str, str], _Task] = {}
        for source in state.sources:
            status = source.status
            task = tasks["source", source.name] = self._task("source", source.name)
            task.samples.append(
                [
                    now_ms,
                    status.rows,
                    status.bytes,
                    status.lag_ms,
                    status.lag_bytes,
                    status.slot_bytes,
                ]
            )
        for materialization in state.materializations:
            key = ("materialization", materialization.name)
            task = tasks[key] = self._task(*key)
            task.samples.append(
                [now_ms, materialization.status.documents, materialization.status.lag_ms]
            )
            _record_transaction(task, now_ms, materialization)
        self._tasks = tasks

    def of_source(self, name: str) -> dict[str, Any]:
        """Return the `history` of a source: time, rows, bytes, lag_ms, lag_bytes, slot_bytes."""
        return {"history": list(self._task("source", name).samples)}

    def of_materialization(self, name: str) -> dict[str, Any]:
        """Return the `history` (time, documents, lag_ms) and the `transactions`."""
        task = self._task("materialization", name)
        return {"history": list(task.samples), "transactions": list(task.transactions)}

    def _task(self, kind: str, name: str) -> _Task:
        return self._tasks.get((kind, name)) or _Task()


def _record_transaction(task: _Task, now_ms: int, materialization: PageMaterialization) -> None:
    """Record the last transaction, unless it is recorded already."""
    status = materialization.status
    counted, documents = status.transactions or 0, status.documents or 0
    durations = {phase: status.last_transaction.get(phase) for phase in PHASES}
    if task.counted is not None and counted > task.counted:
        task.transactions.append(
            {
                "at_ms": now_ms,
                "upper": status.upper,
                **durations,
                "documents": documents - task.documents,
                "transactions": counted - task.counted,
            }
        )
    elif task.transactions and task.counted == counted:
        # A transaction may be acknowledged after the sample that first contains it.
        task.transactions[-1] |= durations
    task.counted, task.documents = counted, documents
