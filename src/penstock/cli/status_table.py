"""Tables that `penstock status` prints."""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from penstock.catalog import LocationStatus, StoredTask
from penstock.cli.output import escape_controls
from penstock.clock import SYSTEM_CLOCK
from penstock.persist.state import END
from penstock.progress.time import describe_time, format_time
from penstock.supervisor.status import LoopStatus, MaterializationStatus, SourceStatus

__all__ = ["render"]

WIDE: Final = 2_000


def render(locations: Sequence[LocationStatus]) -> str:
    """Return the tables of all storage locations as text."""
    # A pipe has no width, and truncated names would be useless to its reader.
    console = Console(soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as capture:  # The console would exit with 1 at a closed pipe.
        for location in locations:
            _render_location(console, location)
    return capture.get()


class _Table(Table):
    """Table of texts with visible control characters."""

    def add_row(self, *cells: str) -> None:  # type: ignore[override] # cells are texts only
        super().add_row(*map(escape_controls, cells))


def _print_line(console: Console, text: str) -> None:
    console.print(escape_controls(text))


def _render_location(console: Console, location: LocationStatus) -> None:
    owner = "no writer"
    if (writer := location.writer) is not None:
        owner = f'written by "{writer["id"]}", process {writer["pid"]} on {writer["host"]}'
        owner += f" since {writer['since']}"
    _print_line(
        console, f"{location.url}: epoch {location.epoch}, {owner}, {location.entries} entries"
    )
    if (error := location.disk_error) is not None:
        _print_line(console, f"error: {error.message}. {error.detail} {error.hint}")
    if location.collections:
        table = _Table(
            "collection", "since", "upper", "batches", "updates", "bytes", "waits for", "error"
        )
        for collection in location.collections:
            waits = [f"hold of {owner}" for owner in collection["held_back_by"]]
            waits += ["a seal"] if collection["unsealed"] else []
            table.add_row(
                collection["name"],
                _time(collection["since"]),
                _time(collection["upper"]),
                *(str(collection[column]) for column in ("batches", "updates", "bytes")),
                ", ".join(waits),
                "" if (error := collection["error"]) is None else _describe_error(error),
            )
        console.print(table)
    if sources := [task for task in location.tasks if isinstance(task.status, SourceStatus)]:
        listed = {collection["name"] for collection in location.collections}
        table = _Table(
            "source", "phase", "at", "rows since start", "started", "behind", "slot holds",
            "waits for", "error",
        )  # fmt: skip
        for task in sources:
            source = task.status
            assert isinstance(source, SourceStatus)
            table.add_row(
                task.name,
                source.phase,
                source.lsn or source.position or "",
                "" if source.rows is None else str(source.rows),
                _started(source),
                _lag(source),
                "" if source.slot_bytes is None else f"{source.slot_bytes} bytes",
                source.waits_for or "",
                "; ".join([*filter(None, [_failure(task)]), *_untracked(source, listed)]),
            )
        console.print(table)
    _render_materializations(console, location)
    if location.holds:
        table = _Table("hold", "kind", "age", "unchanged", "keeps")
        for hold in location.holds:
            sinces = hold["sinces"].items()
            retained = ", ".join(f"{name} from {_time(since)}" for name, since in sinces)
            table.add_row(
                hold["owner"],
                hold["kind"],
                f"{hold['age_ms'] // 1_000} s",
                f"{hold['unchanged_ms'] // 1_000} s",
                retained,
            )
        console.print(table)


def _lag(source: SourceStatus) -> str:
    """Return the lag in upstream's own units, and in seconds if known."""
    of_records = "lag_records" in source.keys
    lag = source.lag_records if of_records else source.lag_bytes
    if lag is None or source.is_disconnected:
        return "unknown"  # Upstream does not answer.
    text = f"{lag} {'records' if of_records else 'bytes'}"
    return text if source.lag_ms is None else f"{text}, {source.lag_ms / 1_000:.1f} s"


def _render_materializations(console: Console, location: LocationStatus) -> None:
    table = _Table(
        "materialization", "phase", "upper", "lag", "documents since start", "bytes since start",
        "started", "last took", "waits for", "error",
    )  # fmt: skip
    bindings = _Table(
        "materialization", "collection", "resource", "mode", "documents since start",
        "bytes since start", "",
    )  # fmt: skip
    for task in location.tasks:
        status = task.status
        if not isinstance(status, MaterializationStatus):
            continue
        durations = status.last_transaction.items()
        table.add_row(
            task.name,
            status.phase,
            describe_time(status.upper),
            "unknown" if status.lag_ms is None else f"{status.lag_ms} ms",
            "" if status.documents is None else str(status.documents),
            "" if status.bytes is None else str(status.bytes),
            _started(status),
            ", ".join(f"{phase.removesuffix('_ms')} {ms} ms" for phase, ms in durations),
            _waiting(status),
            _failure(task) or "; ".join(_degraded(status)),
        )
        for binding in status.bindings:
            is_frozen = binding.collection in status.left_behind
            notes = [*(["frozen"] if is_frozen else [])]
            notes += [] if binding.deletes else ["deletes are ignored"]
            bindings.add_row(
                task.name,
                binding.collection,
                binding.resource,
                "delta updates" if binding.delta_updates else "standard",
                str(binding.documents),
                str(binding.bytes),
                ", ".join(notes),
            )
    if table.row_count:
        console.print(table)
        console.print(bindings)


def _waiting(materialization: MaterializationStatus) -> str:
    """Return the current wait; for a step of the connector, with its duration."""
    waiting = materialization.waiting
    if waiting is None:
        return materialization.waits_for or ""
    return f"{waiting.step}, {(SYSTEM_CLOCK.now_ms() - waiting.since_ms) // 1_000} s"


def _started(status: LoopStatus) -> str:
    """Return the start time of the counters of a task."""
    # Earlier releases did not store it.
    return "" if status.counted_since_ms is None else format_time(status.counted_since_ms)


def _failure(task: StoredTask) -> str:
    return "" if task.error is None else task.error.to_sentences()


def _untracked(source: SourceStatus, listed: Collection[str]) -> list[str]:
    """Return the errors of tables without a collection; the collections table has the others."""
    return [
        table.error_status.to_sentences()
        for table in source.tables
        if table.error_status is not None and table.collection not in listed
    ]


def _degraded(materialization: MaterializationStatus) -> list[str]:
    """Return a line for each errored collection whose bindings are frozen."""
    return [
        f"{frozen.collection} is in error since {describe_time(frozen.time)}: "
        f"{frozen.message}. {frozen.hint}"
        for frozen in materialization.degraded
    ]


def _describe_error(error: Mapping[str, Any]) -> str:
    return f"since {describe_time(error['since'])}: {error['message']}"


def _time(time: int) -> str:
    return "closed" if time == END else describe_time(time)
