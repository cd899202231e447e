"""Loggers and log fields.

A log record has a constant event and variable fields:

    log.warning("store operation failed; retrying", extra=fields(operation="get", key="log/7"))
"""

import logging
from typing import Any

__all__ = ["fields", "logger"]


def logger(package: str) -> logging.Logger:
    """Return the logger of a package, `penstock.<package>`."""
    return logging.getLogger(f"penstock.{package}")


def fields(**values: object) -> dict[str, Any]:
    """Return the fields of a log record, for `extra=`."""
    return {"fields": values}
