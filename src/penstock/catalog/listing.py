"""Which collections a lake has, and which of them a source fills."""

from dataclasses import dataclass

from penstock import persist
from penstock.durable import join
from penstock.ingest.progress_views import progress_views_in
from penstock.persist.lake import storage_locations_below
from penstock.pipeline.file import CATALOG

__all__ = ["Listed", "collections_of"]


@dataclass(frozen=True, slots=True, order=True)
class Listed:
    """A collection, or what shows a source's progress."""

    name: str
    storage_location: str
    progress: bool = False


def collections_of(location: str) -> frozenset[Listed]:
    """All of them, but for those of the catalog itself."""
    found: set[Listed] = set()
    catalog = join(location, CATALOG)
    for url in storage_locations_below(location):
        if url == catalog:
            continue
        where = url.rstrip("/").rpartition("/")[2]
        with persist.open(url, hold=False) as client:
            found.update(Listed(name, where) for name in client.collections())
            found.update(
                Listed(each.name, where, progress=True)
                for each in progress_views_in(client)
                if each.derived
            )
    return frozenset(found)
