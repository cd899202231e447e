"""Source → reclock → persist.

    import penstock.ingest

    penstock.ingest.run("shop.yaml", once=True)

Each source has its own storage location in the lake. Its data collections, its remap and
its state commit together.
"""

from typing import TYPE_CHECKING

from penstock.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.ingest.progress_views import (
        PROGRESS_KEY,
        ProgressFollower,
        ProgressView,
        find_progress_view,
        progress_views_in,
        source_states,
    )
    from penstock.ingest.tasks import Supervisor, drop, run, source_of, tasks_of

__all__ = [
    "PROGRESS_KEY",
    "ProgressFollower",
    "ProgressView",
    "Supervisor",
    "drop",
    "find_progress_view",
    "progress_views_in",
    "run",
    "source_of",
    "source_states",
    "tasks_of",
]

if not TYPE_CHECKING:
    # Importing the sources loads a compiler, which readers do not need.
    __getattr__ = lazy_exports(
        __name__,
        progress_views=(
            "PROGRESS_KEY",
            "ProgressFollower",
            "ProgressView",
            "find_progress_view",
            "progress_views_in",
            "source_states",
        ),
        tasks=("Supervisor", "drop", "run", "source_of", "tasks_of"),
    )
