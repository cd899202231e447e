"""`penstock compact`: do all upkeep now."""

import os
import socket
from typing import Annotated

import typer

from penstock import persist
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.cli.rows import encode_line
from penstock.persist.lake import storage_locations

__all__ = ["compact"]


def compact(
    location: Location,
    writer: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The id under which to take the writer's lock; by default one of this process.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge batches, write a rollup, delete what nobody needs.

    Takes the writer's lock for the while, so it is refused while a writer
    holds it; a running writer does all this by itself in the background.
    """
    # SUBTLE: two runs under one id would take the lock from each other.
    writer = writer or f"penstock-compact-{socket.gethostname()}-{os.getpid()}"
    for url in storage_locations(location):
        with persist.open(url, writer=writer, settings=SETTINGS) as client:
            before = _size(client)
            client.compact()
            after = _size(client)
        if as_json:
            print(encode_line({"location": client.url, "before": before, "after": after}))
        else:
            print(
                f"{client.url}: {before['batches']} batches of {before['updates']} updates "
                f"became {after['batches']} of {after['updates']}"
            )


def _size(client: persist.Client) -> dict[str, int]:
    batches = [batch for c in client.state.collections.values() for batch in c.batches]
    return {
        "batches": len(batches),
        "updates": sum(batch.rows for batch in batches),
        "bytes": sum(batch.size for batch in batches),
    }
