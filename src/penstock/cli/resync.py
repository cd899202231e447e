"""`penstock resync`: compare a source's tables with upstream, and mend what differs."""

from typing import Annotated

import typer

from penstock.catalog.rows import encode_line
from penstock.cli.asking import Wait, asked, place_of
from penstock.cli.options import AsJson, Location
from penstock.errors import UsageError

__all__ = ["resync"]


def resync(
    location: Location,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source.")],
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="TABLE", help="Tables, as schema.table; by default all."),
    ] = None,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Compare tables with their collections as of one moment, and mend the differences.

    The running owner of the source does it and answers; only rows that differ
    are written, at one time. An errored table can be read again from then on.
    """
    left = asked(place_of(location, source), "resync", tables or [], wait=wait)["left"]
    if as_json:
        print(encode_line({"source": source, "tables": tables or [], "done": True, "left": left}))
    else:
        print(f"{source}: compared and mended")
    if left:
        raise UsageError(
            f'source "{source}" has tables that were not mended: {", ".join(left)}',
            detail=" ".join(f"{error.rstrip('.')}." for error in left.values()),
            hint="Do what each of them asks for, or wait for its copy; then resync it by name.",
        )
