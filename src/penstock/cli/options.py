"""Arguments that several verbs take, and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

from penstock import persist

__all__ = ["SETTINGS", "AsJson", "AsOf", "File", "Hold", "Location", "Name", "Task"]

File = Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline's file.")]
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
        help="Epoch milliseconds, RFC 3339, a relative time such as '10 minutes ago', earliest or "
        "latest.",
    ),
]
Hold = Annotated[
    bool,
    typer.Option(
        "--hold/--no-hold",
        help="Keep history from being compacted away while reading; --no-hold leaves no trace "
        "and needs only permission to read.",
        metavar="",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", metavar="")]

SETTINGS = persist.Settings(patience_ms=60_000)
"""Someone is waiting at a terminal: a store that stays away is an error after a minute."""
