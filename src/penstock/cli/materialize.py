"""`penstock materialize`: collections into the endpoints that a file names."""

from penstock.cli.run_options import follows

__all__ = ["materialize"]


@follows("materialization")
def materialize() -> None:
    """Follow the collections that FILE binds into their endpoints, exactly once.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
