"""`penstock resync`: compare a source's tables with upstream, and mend what differs."""

from typing import Annotated

import typer

from penstock.catalog.json_rows import encode_line
from penstock.cli.control import Wait, asked, place_of
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
            help="Tables, as schema.table; parts with a dot in double quotes. By default all.",
        ),
    ] = None,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Compare tables with their collections as of one moment, and mend the differences.

    The running owner of the source does it and answers; only rows that differ
    are written, at one time. An errored table can be read again from then on.
    """
    url = place_of(location, source).url
    tables = [_canonical(each) for each in tables or ()]
    said = asked(url, "resync", tables, wait=wait)
    if said is None:
        raise UsageError(
            f'nobody runs source "{source}" of location "{location}", so it cannot be compared',
            hint="Start it with penstock up FILE, and ask again.",
        )
    # Owners of an older version do not tell how much they mended.
    left, mended = said["left"], said.get("mended")
    if as_json:
        told = {"source": source, "tables": tables, "done": True, "left": left}
        print(encode_line({**told, "mended": mended}))
    else:
        print(f"{source}: compared and mended{_how_much(mended)}")
    if left:
        raise UsageError(
            f'source "{source}" has tables that were not mended: {", ".join(left)}',
            detail=" ".join(f"{error.rstrip('.')}." for error in left.values()),
            hint="Do what each of them asks for, or wait for its copy; then resync it by name.",
        )


def _canonical(table: str) -> str:
    """Return the name of a table as its source reports it, however it was quoted."""
    from penstock.sources.postgres.names import TableName

    return str(TableName.parse(table))


def _how_much(mended: int | None) -> str:
    if mended is None:
        return ""
    return f"; {mended} rows had to go or come" if mended else "; no row differed"
