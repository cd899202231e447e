"""Commands of `penstock`, each imported when it is used.

The modules of commands import the libraries that they need, such as Arrow and pydantic, which take
seconds to load. `penstock --help` imports none of them: it reads the first line of each docstring
from the source.
"""

import ast
from collections.abc import MutableMapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

__all__ = ["Command", "CommandGroup", "LazyGroup"]

COMMANDS: Final = (
    *("demo", "init", "schema", "plan"),
    *("up", "ingest", "materialize"),
    *("status", "read", "tail"),
    *("pause", "resume", "resync", "drop"),
    *("compact", "verify", "release"),
    "connector",
)
"""All commands, in the order of `penstock --help`. Each has a module, except `resume`."""


class _FlagsWithoutType:
    """Mixin that omits `<bool>` next to a flag in --help: a flag takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # TyperCommand
        for parameter in parameters:
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return parameters


class Command(_FlagsWithoutType, TyperCommand):
    """Command of `penstock`."""


class CommandGroup(_FlagsWithoutType, TyperGroup):
    """Command with subcommands."""


class LazyGroup(CommandGroup):
    """`penstock` itself, with `COMMANDS`."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """All commands. Imports their modules."""
        return {name: _load(name) for name in COMMANDS}

    @commands.setter
    def commands(self, registered: MutableMapping[str, Any]) -> None:
        assert not registered, "commands of LazyGroup are not registered"

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None if it does not exist."""
        return _load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands for --help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in COMMANDS])


@cache
def _load(name: str) -> Any:
    """Return a command; a module with subcommands has them in `app`."""
    module = import_module(f"penstock.cli.{_module(name)}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Command)(getattr(module, name))
    return typer.main.get_command(app)


def _module(name: str) -> str:
    return "pause" if name == "resume" else name


def _summary(name: str) -> str:
    """Return the first line of the docstring of a command."""
    source = files("penstock.cli").joinpath(f"{_module(name)}.py").read_text("utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return (ast.get_docstring(statement) or "").split("\n")[0]
    raise AssertionError(f"module {_module(name)} has no function {name}")
