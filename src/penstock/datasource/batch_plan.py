"""Plan of a batch read: its time, its tasks and their hold.

Spark creates a data source when a DataFrame is loaded, and plans it whenever the DataFrame
is computed, in processes that end at once. The time is therefore fixed when the DataFrame is
loaded, and each plan creates a hold that expires after `holdFor` without renewal. Tasks must
finish before that.

Before the first plan nothing is held. If since has advanced by then, "earliest" becomes a
later time. Reads that are planned together agree on it, because the hold of the first one
keeps since in place. Without holds it is an error.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Final

from penstock.datasource.options import BatchOptions
from penstock.datasource.read_task import Task, contents_tasks
from penstock.persist import Client, Settings, open
from penstock.persist.errors import SinceError
from penstock.persist.holds import LeasedClaims
from penstock.persist.lake import find_collection, find_generation
from penstock.persist.scan.plan import scan_snapshot
from penstock.persist.state import SchemaVersion, schema_as_of

__all__ = ["Contents", "find_contents", "plan_contents"]

PATIENCE_MS: Final = 60_000
"""A user waits: an unreachable store is an error after one minute."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one collection as of one time."""

    url: str
    collection: int
    name: str
    as_of: int
    schema: SchemaVersion


def find_contents(options: BatchOptions) -> Contents:
    """Resolve the options to a collection and a time.

    Raises:
        CollectionMissing: The collection does not exist.
        SinceError: The time is below since.
        NotYetComplete: The time is at or beyond upper.
    """
    settings = Settings(patience_ms=PATIENCE_MS)
    client, collection = find_collection(
        options.location, options.collection, hold=False, settings=settings
    )
    with closing(client):
        collection, as_of = find_generation(collection, options.as_of)
        state = collection.state
        scan = scan_snapshot(state, as_of)
        return Contents(client.url, state.id, state.name, scan.as_of, scan.schema)


def plan_contents(contents: Contents, options: BatchOptions) -> list[Task]:
    """Create the hold of a read and return its tasks.

    Raises:
        SinceError: The time is below since by now, and was not "earliest".
    """
    settings = Settings(
        patience_ms=PATIENCE_MS, lease_ms=options.hold_for_ms, background=False, cache_bytes=0
    )
    with open(contents.url, hold=options.hold, settings=settings) as client:
        as_of = contents.as_of
        while True:
            try:
                return _plan(client, contents, as_of, options)
            except SinceError:
                collection = client.reader.refresh().collections.get(contents.collection)
                if (
                    options.as_of != "earliest"
                    or not options.hold
                    or collection is None
                    or collection.since <= as_of
                    or schema_as_of(collection, collection.since) != contents.schema
                ):
                    raise
                as_of = collection.since


def _plan(client: Client, contents: Contents, as_of: int, options: BatchOptions) -> list[Task]:
    claims = client.reader.claims
    with claims.claim(contents.collection, contents.name, as_of) as claim:
        scan = scan_snapshot(claim.state.collections[contents.collection], as_of)
        tasks = contents_tasks(
            contents.url, scan, contents.schema, max_task_bytes=options.max_task_bytes
        )
        if isinstance(claims, LeasedClaims):
            claims.leave()
    return tasks
