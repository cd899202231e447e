"""`penstock materialize`: collections into the endpoints that a file names."""

from penstock.cli.following import AllowDrop, File, For, Http, Master, Once, follow
from penstock.cli.options import AsJson

__all__ = ["materialize"]


def materialize(
    file: File,
    once: Once = False,
    for_seconds: For = None,
    master: Master = None,
    http: Http = "none",
    allow_drop: AllowDrop = False,
    as_json: AsJson = False,
) -> None:
    """Follow the collections that FILE binds into their endpoints, exactly once.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
    follow(
        file,
        ("materialization",),
        once=once,
        for_seconds=for_seconds,
        master=master,
        http=http,
        allow_drop=allow_drop,
        as_json=as_json,
    )
