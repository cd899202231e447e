"""`penstock up`: a whole file, validated, applied and followed."""

from penstock.cli.following import AllowDrop, File, For, Http, Master, Once, follow
from penstock.cli.options import AsJson

__all__ = ["up"]


def up(
    file: File,
    once: Once = False,
    for_seconds: For = None,
    master: Master = None,
    http: Http = "127.0.0.1:8080",
    allow_drop: AllowDrop = False,
    as_json: AsJson = False,
) -> None:
    """Validate FILE, apply what it changes, then follow: sources, upkeep, materializations.

    Stops cleanly on SIGINT and SIGTERM; started again, it goes on where it was.
    """
    follow(
        file,
        ("source", "materialization"),
        once=once,
        for_seconds=for_seconds,
        master=master,
        http=http,
        allow_drop=allow_drop,
        as_json=as_json,
    )
