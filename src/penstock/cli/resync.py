"""`penstock resync`: compare a source's tables with upstream, and mend what differs."""

import random
from typing import Annotated

import typer

from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.cli.rows import encode_line
from penstock.durable import join
from penstock.errors import UsageError
from penstock.ingest.requests import ask
from penstock.persist.lake import is_storage_location, open_store

__all__ = ["resync"]


def resync(
    location: Location,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source.")],
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="TABLE", help="Tables, as schema.table; by default all."),
    ] = None,
    wait: Annotated[
        int, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")
    ] = 600,
    as_json: AsJson = False,
) -> None:
    """Compare tables with their collections as of one moment, and mend the differences.

    The running owner of the source does it and answers; only rows that differ
    are written, at one time. An errored table can be read again from then on.
    """
    url = location if is_storage_location(location) else join(location, source)
    if not is_storage_location(url):
        raise UsageError(
            f'location "{location}" has no source "{source}"',
            hint=f"See what there is: penstock status {location}",
        )
    blob = open_store(url, SETTINGS)
    try:
        said = ask(
            blob,
            "resync",
            tables or [],
            clock=SETTINGS.clock,
            chance=random.Random(),
            patience_ms=wait * 1_000,
        )
    finally:
        blob.close()
    if not said["done"]:
        raise UsageError(said["error"], detail=said["detail"], hint=said["hint"])
    left = said["left"]
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
