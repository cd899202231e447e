"""`penstock compact`: do all upkeep now."""

import sys
from typing import Annotated, Final

import typer

from penstock import persist
from penstock.catalog.json_rows import encode_line
from penstock.cli.control import Wait, asked, here
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.persist.lake import storage_locations
from penstock.persist.merge.merger import BigMerges, LazyBigMerges

__all__ = ["compact"]

CATALOG: Final = "catalog"
"""As `penstock.catalog.objects` has it, which brings a compiler along."""


def compact(
    location: Location,
    writer: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The id under which to take the writer's lock; by default one of this process.",
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where Spark runs if a merge needs it: local[*], spark://host:port, "
            "sc://host:port.",
        ),
    ] = None,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Merge batches, write a rollup, delete what nobody needs.

    A running owner is asked to do it. Else the writer's lock is taken for the while;
    Spark is started only for a merge that is too big for this process.
    """
    for url in storage_locations(location):
        if writer is None and not _is_catalog(url) and asked(url, "compact", wait=wait) is not None:
            if as_json:
                print(encode_line({"location": url, "by": "its owner"}))
            else:
                print(f"{url}: its owner has compacted it")
            continue
        with persist.open(url, writer=writer or _id_for(url), settings=SETTINGS) as client:
            client.delegate_big_merges(_spark(client, master))
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


def _id_for(url: str) -> str:
    """One of this process; for the catalog the one that all use, so that nobody is kept out."""
    return CATALOG if _is_catalog(url) else here("compact")


def _is_catalog(url: str) -> bool:
    return url.rstrip("/").endswith(f"/{CATALOG}")


def _spark(client: persist.Client, master: str | None) -> LazyBigMerges:
    """Merges by Spark, which is started for the first merge that needs it."""

    def start(collection: str, memory: int) -> BigMerges:
        # Here, because few runs need it and importing it takes a second.
        from penstock.engine.spark import session
        from penstock.spark import compactor

        here = client.reader.settings.merge_bytes
        print(
            f'merging by Spark: collection "{collection}" has {memory} bytes to merge, and this '
            f"process merges up to {here}",
            file=sys.stderr,
        )
        return compactor(session(master=master), client)

    return LazyBigMerges(start)


def _size(client: persist.Client) -> dict[str, int]:
    batches = [batch for c in client.state.collections.values() for batch in c.batches]
    return {
        "batches": len(batches),
        "updates": sum(batch.rows for batch in batches),
        "bytes": sum(batch.size for batch in batches),
    }
