"""`penstock read`: the rows of a collection as of a time."""

import sys

from penstock.catalog import encode_line, rows_of
from penstock.cli.options import SETTINGS, AsJson, AsOf, Hold, Location, Name
from penstock.errors import InternalError
from penstock.ingest import ProgressView, find_progress_view
from penstock.persist import Client
from penstock.persist.lake import find_collection, find_generation

__all__ = ["read"]


def read(
    location: Location,
    collection: Name,
    as_of: AsOf = "latest",
    hold: Hold = True,
    as_json: AsJson = True,
) -> None:
    """Print the rows of a collection as of a time, one JSON object per line."""
    bindings = find_progress_view(location, collection, hold=hold, settings=SETTINGS)
    if bindings is not None:
        _read_bindings(*bindings, as_of)
        return
    client, handle = find_collection(location, collection, hold=hold, settings=SETTINGS)
    with client:
        handle, time = find_generation(handle, as_of)
        snapshot = handle.snapshot(time)
        for _, count, row in rows_of(snapshot.arrow(), handle.state):
            if count < 0:
                raise InternalError(
                    f'collection "{collection}" contains a row {count} times as of {time}',
                    detail="The row was retracted more often than it was inserted.",
                    hint="Find the time with penstock tail.",
                )
            for _ in range(count):
                sys.stdout.write(encode_line(row) + "\n")


def _read_bindings(client: Client, bindings: ProgressView, as_of: str) -> None:
    """Print each row once: the diffs of remap bindings are offsets."""
    with client:
        rows = bindings.as_of(bindings.time_of(as_of))
        for row in rows.to_pylist():
            sys.stdout.write(encode_line(row) + "\n")
