"""Planning a batch reading: which time, which tasks, and a hold for them.

Spark makes a source when a DataFrame is loaded and plans it whenever it is
computed, in processes that end right after. So the time is fixed once, when
it is loaded, and each planning leaves a hold behind that nobody renews: it
lasts for `holdFor`, which the tasks must not outlive.

Nothing is held before the first planning. Where since has moved on by then, the
earliest time is a later one. Readings planned together agree on it, for the
first one's hold keeps since where it is; so without holds it is an error.
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
"""Someone is waiting: a store that stays away is an error after a minute."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one collection as of one time."""

    url: str
    collection: int
    name: str
    as_of: int
    schema: SchemaVersion


def find_contents(options: BatchOptions) -> Contents:
    """What the options mean now.

    Raises:
        CollectionMissing: there is no such collection.
        SinceError: the time lies below since.
        NotYetComplete: it lies at or past upper.
    """
    settings = Settings(patience_ms=PATIENCE_MS)
    client, found = find_collection(
        options.location, options.collection, hold=False, settings=settings
    )
    with closing(client):
        found, as_of = find_generation(found, options.as_of)
        state = found.state
        scan = scan_snapshot(state, as_of)
        return Contents(client.url, state.id, state.name, scan.as_of, scan.schema)


def plan_contents(contents: Contents, options: BatchOptions) -> list[Task]:
    """The tasks that read `contents`, and the history they need held for them.

    Raises:
        SinceError: the time lies below since by now, and was not "earliest".
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
                collection = client.reader.look().collections.get(contents.collection)
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
