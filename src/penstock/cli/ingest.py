"""`penstock ingest`: the sources of a file into collections."""

from penstock.cli.following import AllowDrop, File, For, Http, Master, Once, follow
from penstock.cli.options import AsJson

__all__ = ["ingest"]


def ingest(
    file: File,
    once: Once = False,
    for_seconds: For = None,
    master: Master = None,
    http: Http = "none",
    allow_drop: AllowDrop = False,
    as_json: AsJson = False,
) -> None:
    """Follow the sources of FILE: a complete first copy, then every change.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
    follow(
        file,
        ("source",),
        once=once,
        for_seconds=for_seconds,
        master=master,
        http=http,
        allow_drop=allow_drop,
        as_json=as_json,
    )
