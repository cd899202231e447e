"""Source → reclock → persist.

    import penstock.ingest

    penstock.ingest.run("shop.yaml", once=True)

Each source has its own storage location in the lake. Its data collections, its remap and
its state commit together.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ingest.tasks import Supervisor, run

__all__ = ["Supervisor", "run"]


def __getattr__(name: str) -> Any:
    # Importing the sources loads a compiler, which readers do not need.
    if name in __all__:
        from penstock.ingest import tasks

        return getattr(tasks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
