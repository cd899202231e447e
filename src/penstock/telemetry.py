"""Log fields and counters: what a machine collects and a tired person reads.

A log line is a short phrase that never changes and fields that do:

    log.warning("store operation fails", extra=fields(operation="get", key="log/7"))
"""

import logging
from typing import Any

__all__ = ["fields", "logger"]


def logger(room: str) -> logging.Logger:
    """The logger of one room, below `penstock`."""
    return logging.getLogger(f"penstock.{room}")


def fields(**values: object) -> dict[str, Any]:
    """The changing half of a log line, for `extra=`."""
    return {"fields": values}
