"""From a source, over the reclock, into persist.

    import penstock.ingest

    penstock.ingest.run("shop.yaml", once=True)

Each source of the file has a storage location of its own below the file's
location: its data collections, its remap and its notes commit together.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ingest.running import Running, run

__all__ = ["Running", "run"]


def __getattr__(name: str) -> Any:
    # Sources bring a compiler along, which whoever only reads should not wait for.
    if name in __all__:
        from penstock.ingest import running

        return getattr(running, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
