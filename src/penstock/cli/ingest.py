"""`penstock ingest`: the sources of a file into collections."""

from penstock.cli.run_options import follows

__all__ = ["ingest"]


@follows("source")
def ingest() -> None:
    """Follow the sources of FILE: a complete first copy, then every change.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
