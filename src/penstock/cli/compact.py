"""`penstock compact`: run all maintenance now."""

import sys
from typing import Annotated, Final

import typer

from penstock import persist
from penstock.catalog import encode_line
from penstock.cli.control import Wait, local_writer_id, request_owner
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.persist.lake import storage_locations
from penstock.persist.merge.merger import BigMerges, LazyBigMerges

__all__ = ["compact"]

CATALOG: Final = "catalog"
"""Same value as in `penstock.catalog.objects`, which imports a compiler."""


def compact(
    location: Location,
    writer: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Take the lock with this writer id; the default is unique to this process.",
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Run large merges on this Spark master: local[*], spark://host:port, "
            "sc://host:port. The default is PENSTOCK_MASTER, then this machine.",
        ),
    ] = None,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Merge batches, write a rollup, and delete unneeded files.

    The running owner executes it. Without an owner, this process takes the lock. Spark starts only
    for a merge that is too large for this process.
    """
    for url in storage_locations(location):
        may_have_owner = writer is None and not _is_catalog(url)
        if may_have_owner and request_owner(url, "compact", wait=wait) is not None:
            if as_json:
                print(encode_line({"location": url, "by": "its owner"}))
            else:
                print(f"{url}: compacted by its owner")
            continue
        with persist.open(url, writer=writer or _writer_id(url), settings=SETTINGS) as client:
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


def _writer_id(url: str) -> str:
    """Return an id of this process; for the catalog the shared id, which locks no process out."""
    return CATALOG if _is_catalog(url) else local_writer_id("compact")


def _is_catalog(url: str) -> bool:
    return url.rstrip("/").endswith(f"/{CATALOG}")


def _spark(client: persist.Client, master: str | None) -> LazyBigMerges:
    """Return merges on Spark, which starts with the first merge that needs it."""

    def start(collection: str, memory: int) -> BigMerges:
        # Imported late: few runs need it, and the import takes a second.
        from penstock.engine.spark import session
        from penstock.spark import compactor

        limit = client.reader.settings.merge_bytes
        print(
            f'merging on Spark: collection "{collection}" has {memory} bytes to merge; the limit '
            f"of this process is {limit} bytes",
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
