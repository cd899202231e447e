"""`penstock tail`: the changes of a collection when their times are complete."""

import sys
from typing import Annotated, Any

import pyarrow.compute as pc
import typer

from penstock.catalog import encode_line, rows_of
from penstock.cli.options import SETTINGS, AsJson, AsOf, Hold, Location, Name
from penstock.data.arrow import DIFF, PROGRESSED, TIME
from penstock.errors import UsageError
from penstock.ingest import ProgressFollower, find_progress_view
from penstock.persist import Snapshot
from penstock.persist.lake import find_collection, find_generation, time_of
from penstock.progress.time import describe_time

__all__ = ["tail"]


def tail(
    location: Location,
    collection: Name,
    as_of: AsOf = "latest",
    until: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Stop before this time, in the forms of --as-of; by default do not stop.",
        ),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot/--no-snapshot",
            help="Print the contents as of T first.",
        ),
    ] = True,
    progress: Annotated[
        bool,
        typer.Option("--progress", help="Also print progress, in mz_progressed lines."),
    ] = False,
    hold: Hold = True,
    as_json: AsJson = True,
) -> None:
    """Print changes, one JSON object per line: mz_timestamp, mz_diff, then the columns."""
    bindings = find_progress_view(location, collection, hold=hold, settings=SETTINGS)
    if bindings is None:
        client, handle = find_collection(location, collection, hold=hold, settings=SETTINGS)
    else:
        client, handle = bindings[0], bindings[1].remap
    with client:
        end = None if until is None else time_of(until, handle.state)
        if bindings is None:
            handle, start = find_generation(handle, as_of)
        else:
            start = bindings[1].time_of(as_of)
        state = handle.state
        if end is not None and end < start:
            raise UsageError(
                f"tail cannot end before {describe_time(end)} and begin as of "
                f"{describe_time(start)}",
                hint="Give --until a time at or after --as-of.",
            )
        if as_of == "latest" and state.upper == 0:
            # No time is complete yet: begin before the first time.
            start, snapshot = -1, False
        names = handle.schema.names
        follower = None
        if bindings is not None and bindings[1].derived:
            names = [name for name in bindings[1].schema.names if name != TIME]
            follower = ProgressFollower(bindings[1], start)
        if progress and start >= 0:
            _print(_line(start, None, dict.fromkeys(names), progressed=True))
        with handle.listen(start, snapshot=snapshot) as listener:
            while end is None or listener.frontier < end or (snapshot and start < end):
                changes = listener.next_changes(timeout_ms=None)
                if changes is None:
                    continue
                rows = changes.arrow() if follower is None else follower.to_progress(changes)
                if end is not None:
                    rows = rows.filter(pc.less(rows.column(TIME), end))
                for time, diff, row in rows_of(rows, handle.state):
                    _print(_line(time, diff, row, progressed=False if progress else None))
                if isinstance(changes, Snapshot):
                    snapshot = False
                elif progress:
                    reached = changes.upper if end is None else min(changes.upper, end)
                    _print(_line(reached, None, dict.fromkeys(names), progressed=True))
                sys.stdout.flush()


def _line(time: int, diff: int | None, row: dict[str, Any], *, progressed: bool | None) -> str:
    line: dict[str, Any] = {TIME: time}
    if progressed is not None:
        line[PROGRESSED] = progressed
    line[DIFF] = diff
    return encode_line(line | row)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
