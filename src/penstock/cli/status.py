"""`penstock status`: writers, collections, holds and task status of a lake."""

from typing import Annotated

import typer

from penstock.catalog import encode_line, inspect_lake
from penstock.cli.options import SETTINGS, AsJson, Location

__all__ = ["status"]


def status(
    location: Location,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also print the hidden collections of sources."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print writers, collections with since and upper, holds, and the status of tasks."""
    locations = inspect_lake(location, SETTINGS, hidden=everything)
    if as_json:
        statuses = [status.to_json() for status in locations]
        print(encode_line({"location": location, "storage_locations": statuses}))
        return
    from penstock.cli.status_table import render

    print(render(locations), end="")
