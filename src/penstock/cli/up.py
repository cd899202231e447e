"""`penstock up`: a whole file, validated, applied and followed."""

from penstock.cli.run_options import follows

__all__ = ["up"]


@follows("source", "materialization", http="127.0.0.1:8080")
def up() -> None:
    """Validate FILE, apply what it changes, then follow: sources, upkeep, materializations.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
