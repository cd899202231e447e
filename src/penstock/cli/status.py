"""`penstock status`: what is there, how far it has come, what holds it back."""

from typing import Annotated

import typer

from penstock.catalog.inspect import inspect_lake
from penstock.catalog.json_rows import encode_line
from penstock.cli.options import SETTINGS, AsJson, Location

__all__ = ["status"]


def status(
    location: Location,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also show hidden collections, which sources keep."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show writers, collections with since and upper, holds, and what each waits for."""
    found = inspect_lake(location, SETTINGS, hidden=everything)
    if as_json:
        print(encode_line({"location": location, "storage_locations": found}))
        return
    from penstock.cli.status_table import shown

    print(shown(found), end="")
