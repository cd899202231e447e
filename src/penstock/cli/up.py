"""`penstock up`: validate, apply and run a file."""

from penstock.cli.run_options import run_command

__all__ = ["up"]


@run_command("source", "materialization", http="127.0.0.1:8080")
def up() -> None:
    """Validate FILE, apply its changes, then run its sources and materializations.

    SIGINT and SIGTERM stop it cleanly; the next start resumes.
    """
