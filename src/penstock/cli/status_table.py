"""What `penstock status` shows to people: tables."""

import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from penstock.clock import SYSTEM_CLOCK
from penstock.persist.state import END
from penstock.progress.time import describe_time, format_time

__all__ = ["shown"]

WIDE: Final = 2_000


def shown(found: Sequence[dict[str, Any]]) -> str:
    """Storage locations, one after the other."""
    # What reads a pipe has no width, and names cut off would be of no use to it.
    console = Console(soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as said:  # By itself it would exit with 1 when its reader goes away.
        for each in found:
            _show(console, each)
    return said.get()


def _show(console: Console, found: dict[str, Any]) -> None:
    held = "no writer"
    if (writer := found["writer"]) is not None:
        held = f'written by "{writer["id"]}", process {writer["pid"]} on {writer["host"]}'
        held += f" since {writer['since']}"
    console.print(
        f"{found['location']}: epoch {found['epoch']}, {held}, {found['entries']} entries"
    )
    if (full := found["disk_error"]) is not None:
        console.print(f"error: {full['message']}. {full['detail']} {full['hint']}")
    if found["collections"]:
        table = Table(
            "collection", "since", "upper", "batches", "updates", "bytes", "waits for", "error"
        )
        for each in found["collections"]:
            waits = [f"hold of {owner}" for owner in each["held_back_by"]]
            waits += ["a seal"] if each["unsealed"] else []
            table.add_row(
                each["name"],
                _time(each["since"]),
                _time(each["upper"]),
                *(str(each[column]) for column in ("batches", "updates", "bytes")),
                ", ".join(waits),
                "" if (error := each["error"]) is None else _told(error),
            )
        console.print(table)
    if found["sources"]:
        listed = {each["name"] for each in found["collections"]}
        table = Table(
            "source", "phase", "at", "rows since start", "started", "behind", "slot holds",
            "waits for", "error",
        )  # fmt: skip
        for each in found["sources"]:
            held = each.get("slot_bytes")
            table.add_row(
                each["source"],
                each.get("phase", ""),
                str(each.get("lsn") or each.get("position") or ""),
                str(each.get("rows", "")),
                _started(each),
                _behind(each),
                "" if held is None else f"{held} bytes",
                each.get("waits_for") or "",
                "; ".join([*filter(None, [_failure(each)]), *_untracked(each, listed)]),
            )
        console.print(table)
    if found["materializations"]:
        _show_materializations(console, found["materializations"])
    if found["holds"]:
        table = Table("hold", "kind", "age", "unchanged", "keeps")
        for each in found["holds"]:
            sinces = each["sinces"].items()
            keeps = ", ".join(f"{name} from {_time(since)}" for name, since in sinces)
            table.add_row(
                each["owner"],
                each["kind"],
                f"{each['age_ms'] // 1_000} s",
                f"{each['unchanged_ms'] // 1_000} s",
                keeps,
            )
        console.print(table)


def _behind(source: dict[str, Any]) -> str:
    """Return the lag in upstream's own units, and in seconds if known."""
    unit = "records" if "lag_records" in source else "bytes"
    lag, lag_ms = source.get(f"lag_{unit}"), source.get("lag_ms")
    if lag is None or source.get("connected") is False:
        return "unknown"  # Upstream does not answer.
    return f"{lag} {unit}" if lag_ms is None else f"{lag} {unit}, {lag_ms / 1_000:.1f} s"


def _show_materializations(console: Console, found: list[dict[str, Any]]) -> None:
    table = Table(
        "materialization", "phase", "upper", "lag", "documents since start", "bytes since start",
        "started", "last took", "waits for", "error",
    )  # fmt: skip
    for each in found:
        last = each.get("last_transaction", {})
        table.add_row(
            each["materialization"],
            each["phase"],
            describe_time(each.get("upper", 0)),
            "unknown" if (lag_ms := each.get("lag_ms")) is None else f"{lag_ms} ms",
            str(each.get("documents", "")),
            str(each.get("bytes", "")),
            _started(each),
            ", ".join(f"{phase.removesuffix('_ms')} {ms} ms" for phase, ms in last.items()),
            _waiting(each),
            _failure(each) or "; ".join(_degraded(each)),
        )
    console.print(table)
    table = Table(
        "materialization", "collection", "resource", "mode", "documents since start",
        "bytes since start", "",
    )  # fmt: skip
    for each in found:
        for binding in each.get("bindings", ()):
            table.add_row(
                each["materialization"],
                binding["collection"],
                binding["resource"],
                "delta updates" if binding["delta_updates"] else "standard",
                str(binding["documents"]),
                str(binding["bytes"]),
                ", ".join(
                    word
                    for word, so in (
                        ("frozen", binding["collection"] in each["left_behind"]),
                        ("deletes are ignored", not binding["deletes"]),
                    )
                    if so
                ),
            )
    console.print(table)


def _waiting(materialization: dict[str, Any]) -> str:
    """Return what it waits for; of a step of the connector, with its duration."""
    waiting = materialization.get("waiting")
    if waiting is None:
        return materialization.get("waits_for") or ""
    return f"{waiting['step']}, {(SYSTEM_CLOCK.now_ms() - waiting['since_ms']) // 1_000} s"


def _started(task: dict[str, Any]) -> str:
    """Return the time at which the counts of a task began."""
    # Notes of an earlier release do not have it.
    since_ms = task.get("counted_since_ms")
    return "" if since_ms is None else format_time(since_ms)


def _failure(task: dict[str, Any]) -> str:
    error = task["error"]
    parts = [] if error is None else [error["message"], error["detail"], error["hint"]]
    return ". ".join(part.rstrip(".") for part in parts if part)


def _untracked(source: dict[str, Any], listed: Collection[str]) -> list[str]:
    """Return the errors of tables that have no collection in which they would be listed."""
    return [
        ". ".join(
            part.rstrip(".")
            for part in (table["error"], table.get("error_detail"), table.get("error_hint"))
            if part
        )
        for table in source.get("tables", ())
        if table["error"] and table["collection"] not in listed
    ]


def _degraded(materialization: dict[str, Any]) -> list[str]:
    """A line for each errored collection whose bindings are frozen."""
    # A status that an earlier release wrote does not have the errors.
    return [
        f"{each['collection']} is in error since {describe_time(each['time'])}: "
        f"{each['message']}. {each['hint']}"
        for each in materialization.get("degraded", ())
    ]


def _told(error: dict[str, Any]) -> str:
    return f"since {describe_time(error['since'])}: {error['message']}"


def _time(moment: int) -> str:
    return "closed" if moment == END else describe_time(moment)
