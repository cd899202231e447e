"""`penstock materialize`: run the materializations of a file."""

from penstock.cli.run_options import run_command

__all__ = ["materialize"]


@run_command("materialization")
def materialize() -> None:
    """Run the materializations of FILE, exactly once if the endpoint supports it.

    SIGINT and SIGTERM stop it cleanly; the next start resumes.
    """
