"""`penstock resync`: compare tables of a source with upstream, and correct the differences."""

from typing import Annotated

import typer

from penstock.catalog import encode_line
from penstock.cli.control import Wait, locate_task, request_owner
from penstock.cli.options import AsJson, Location
from penstock.errors import UsageError

__all__ = ["resync"]


def resync(
    location: Location,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source.")],
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE",
            help="Tables, as schema.table, by default all; quote a part with a dot.",
        ),
    ] = None,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Compare tables with their collections as of one time, and correct the differences.

    The running owner of the source executes it. Only rows that differ are written, at one time. An
    errored table is readable again from that time on.
    """
    url = locate_task(location, source).url
    tables = [_canonical(table) for table in tables or ()]
    response = request_owner(url, "resync", tables, wait=wait)
    if response is None:
        raise UsageError(
            f'source "{source}" of location "{location}" is not running',
            detail="Only the process that runs a source can compare its tables.",
            hint="Start the source with penstock up FILE, then repeat the command.",
        )
    # Owners of an older version do not report the number of corrected rows.
    left, corrected = response["left"], response.get("mended")
    if as_json:
        result = {"source": source, "tables": tables, "done": True, "left": left}
        print(encode_line({**result, "mended": corrected}))
    else:
        print(f"{source}: compared{_describe_count(corrected)}")
    if left:
        raise UsageError(
            f'tables of source "{source}" were not compared: {", ".join(left)}',
            detail=" ".join(f"{error.rstrip('.')}." for error in left.values()),
            hint="Correct the cause of each, or wait for its initial snapshot. Then resync these "
            "tables.",
        )


def _canonical(table: str) -> str:
    """Return the name of a table as its source reports it, however it was quoted."""
    from penstock.sources.postgres.names import TableName

    return str(TableName.parse(table))


def _describe_count(corrected: int | None) -> str:
    return "" if corrected is None else f", {corrected} rows corrected"
