"""Arguments and settings that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from penstock import persist

__all__ = [
    "SETTINGS",
    "AsJson",
    "AsOf",
    "File",
    "Hold",
    "Location",
    "Name",
    "Task",
]

File = Annotated[Path, typer.Argument(metavar="FILE", help="Pipeline file.")]
Location = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        help="URL of a lake or a storage location: file:./data, s3://bucket/prefix.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="COLLECTION", help="Name of the collection.")]
Task = Annotated[str, typer.Argument(metavar="NAME", help="Name of a source or a materialization.")]
AsOf = Annotated[
    str,
    typer.Option(
        metavar="T",
        help="Read as of this time: epoch milliseconds, RFC 3339, a relative time such as "
        "'10 minutes ago', earliest or latest.",
    ),
]
Hold = Annotated[
    bool,
    typer.Option(
        "--hold/--no-hold",
        help="Hold the history while reading it; --no-hold writes nothing and needs only read "
        "permission.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON."),
]

SETTINGS = persist.Settings(patience_ms=60_000)
"""Settings of interactive commands: an unavailable store is an error after a minute."""
