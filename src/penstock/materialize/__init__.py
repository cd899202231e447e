"""Materializations: collections written to endpoints, exactly once, through connectors.

run(FILE, jobs=…)      all materializations of a pipeline file
connect(ADDRESS)       one connector, of any author
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import penstock.protocol  # noqa: F401 - before gRPC: sets its log level
from penstock.materialize.connector_client import (
    ConnectorConnection,
    ConnectorStream,
    Generation,
    connect,
)

if TYPE_CHECKING:
    from penstock.materialize.runner import LocalRunner, Runner
    from penstock.materialize.tasks import Supervisor, run

__all__ = [
    "ConnectorConnection",
    "ConnectorStream",
    "Generation",
    "LocalRunner",
    "Runner",
    "Supervisor",
    "connect",
    "run",
]

_LATER: Final = {"Runner": "runner", "LocalRunner": "runner", "Supervisor": "tasks", "run": "tasks"}


def __getattr__(name: str) -> Any:
    # These modules load compiled code, which a client of one connector does not need.
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
