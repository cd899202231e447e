"""`penstock read`: the rows of a collection as of a time."""

import sys

from penstock.catalog.json_rows import encode_line, rows_of
from penstock.cli.options import SETTINGS, AsJson, AsOf, Hold, Location, Name
from penstock.errors import InternalError
from penstock.ingest.progress_views import ProgressView, find_progress_view
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
    """Print the rows as of a time, one JSON object a line."""
    bindings = find_progress_view(location, collection, hold=hold, settings=SETTINGS)
    if bindings is not None:
        _read_bindings(*bindings, as_of)
        return
    client, found = find_collection(location, collection, hold=hold, settings=SETTINGS)
    with client:
        found, moment = find_generation(found, as_of)
        snapshot = found.snapshot(moment)
        for _, count, row in rows_of(snapshot.arrow(), found.state):
            if count < 0:
                raise InternalError(
                    f'collection "{collection}" holds {count} of a row as of {moment}',
                    detail="It was retracted more often than it was written.",
                    hint="Look at its changes with penstock tail to see when.",
                )
            for _ in range(count):
                sys.stdout.write(encode_line(row) + "\n")


def _read_bindings(client: Client, bindings: ProgressView, as_of: str) -> None:
    """Each row once: what is counted there are offsets."""
    with client:
        rows = bindings.as_of(bindings.time_of(as_of))
        for row in rows.to_pylist():
            sys.stdout.write(encode_line(row) + "\n")
