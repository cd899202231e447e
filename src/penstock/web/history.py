"""Recent samples of the status, so a chart has data when the page is opened.

The samples are in memory and bounded: ten minutes of samples, a hundred transactions.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["History"]

SAMPLES: Final = 600
TRANSACTIONS: Final = 100
PHASES: Final = ("opened_ms", "read_ms", "stored_ms", "committed_ms", "acknowledged_ms")
SOURCE: Final = ("rows", "bytes", "lag_ms", "lag_bytes", "slot_bytes")
MATERIALIZATION: Final = ("documents", "lag_ms")


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

    def sample(self, now_ms: int, state: Mapping[str, Any]) -> None:
        """Add a sample of each task in `state`, and drop tasks that it no longer contains."""
        there: dict[tuple[str, str], _Task] = {}
        for each in state["sources"]:
            task = there["source", each["name"]] = self._task("source", each["name"])
            task.samples.append([now_ms, *(each.get(what) for what in SOURCE)])
        for each in state["materializations"]:
            key = ("materialization", each["name"])
            task = there[key] = self._task(*key)
            task.samples.append([now_ms, *(each.get(what) for what in MATERIALIZATION)])
            _count(task, now_ms, each)
        self._tasks = there

    def of_source(self, name: str) -> dict[str, Any]:
        """Return the `history` of a source: a time, then the fields of `SOURCE`."""
        return {"history": list(self._task("source", name).samples)}

    def of_materialization(self, name: str) -> dict[str, Any]:
        """Return the `history` (time, then the fields of `MATERIALIZATION`) and `transactions`."""
        task = self._task("materialization", name)
        return {"history": list(task.samples), "transactions": list(task.transactions)}

    def _task(self, kind: str, name: str) -> _Task:
        return self._tasks.get((kind, name)) or _Task()


def _count(task: _Task, now_ms: int, told: Mapping[str, Any]) -> None:
    """Record the last transaction, unless it is recorded already."""
    counted, last = told.get("transactions_total") or 0, told.get("last_transaction") or {}
    documents = told.get("documents") or 0
    if task.counted is not None and counted > task.counted:
        task.transactions.append(
            {
                "at_ms": now_ms,
                "upper": told.get("upper"),
                **{phase: last.get(phase) for phase in PHASES},
                "documents": documents - task.documents,
                "transactions": counted - task.counted,
            }
        )
    elif task.transactions and task.counted == counted:
        # A transaction may be acknowledged after the sample that first contains it.
        task.transactions[-1] |= {phase: last.get(phase) for phase in PHASES}
    task.counted, task.documents = counted, documents
