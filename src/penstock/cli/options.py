"""Arguments that several verbs take, and what they mean."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from penstock import persist

__all__ = [
    "SETTINGS",
    "AsJson",
    "AsOf",
    "Command",
    "CommandGroup",
    "File",
    "Hold",
    "Location",
    "Name",
    "Task",
]

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
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON."),
]

SETTINGS = persist.Settings(patience_ms=60_000)
"""Someone is waiting at a terminal: a store that stays away is an error after a minute."""


class _FlagsWithoutType:
    """Shows no `<bool>` next to a flag in --help: a flag takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # TyperCommand
        for parameter in parameters:
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return parameters


class Command(_FlagsWithoutType, TyperCommand):
    """A command of `penstock`."""


class CommandGroup(_FlagsWithoutType, TyperGroup):
    """`penstock` itself, or a command that has commands."""
