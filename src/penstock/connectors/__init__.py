"""Built-in connectors. Each depends only on the SDK and its endpoint."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from penstock.errors import UsageError
from penstock.sdk import Connector

__all__ = ["BUILT_IN", "built_in"]

BUILT_IN: Mapping[str, str] = {
    "plain-files": "penstock.connectors.files.plain_files",
    "postgres": "penstock.connectors.postgres",
    "push-files": "penstock.connectors.files.push_files",
    "sqlite": "penstock.connectors.sqlite",
    "staged-files": "penstock.connectors.files.staged_files",
}
"""Module of each connector, by name. Its function `connector` creates the connector."""


def built_in(name: str) -> Connector[Any, Any]:
    """Return a built-in connector.

    Raises:
        UsageError: no connector has this name.
    """
    if name not in BUILT_IN:
        raise UsageError(
            f'connector "{name}" does not exist',
            hint=f"The built-in connectors are {', '.join(sorted(BUILT_IN))}.",
        )
    make: Callable[[], Connector[Any, Any]] = import_module(BUILT_IN[name]).connector
    return make()
