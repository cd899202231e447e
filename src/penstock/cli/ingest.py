"""`penstock ingest`: run the sources of a file."""

from penstock.cli.run_options import run_command

__all__ = ["ingest"]


@run_command("source")
def ingest() -> None:
    """Run the sources of FILE: an initial snapshot, then every change.

    SIGINT and SIGTERM stop it cleanly; the next start resumes.
    """
