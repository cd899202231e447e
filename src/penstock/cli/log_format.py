"""Formats of log lines: the event and its fields as text, or one JSON object per line."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.errors import UsageError

__all__ = ["FieldsFormatter", "JsonFormatter", "log_to_stderr", "only_errors_if"]

FORMAT: Final = "PENSTOCK_LOG_FORMAT"
LEVEL: Final = "PENSTOCK_LOG_LEVEL"
LEVELS: Final = ("debug", "info", "warning", "error")


class FieldsFormatter(logging.Formatter):
    """Formatter that appends the fields of a line (`telemetry.fields`) as `key=value`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name.
        """Return the line, without a traceback."""
        fields: dict[str, object] = getattr(record, "fields", {})
        pairs = (f"{name}={_quote(str(value))}" for name, value in fields.items())
        return " ".join([super().formatMessage(record), *pairs])


class JsonFormatter(logging.Formatter):
    """Formatter of a JSON object: time, level, logger, message, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = getattr(record, "fields", {})
        line = {
            **{name: _json(value) for name, value in fields.items()},
            "time_ms": int(record.created * 1_000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr() -> None:
    """Log to standard error, in the format and from the level of the environment variables.

    Raises:
        UsageError: the value of a variable is invalid.
    """
    style = _read_choice(FORMAT, ("text", "json"), "text")
    level = _read_choice(LEVEL, LEVELS, "warning")
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if style == "json"
        else FieldsFormatter("%(levelname)s %(name)s: %(message)s")
    )
    handler.addFilter(_is_not_from_py4j)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("penstock").setLevel(level.upper())


@contextmanager
def only_errors_if(condition: Callable[[], bool]) -> Iterator[None]:
    """In the block, drop log lines below ERROR while `condition` holds."""

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or not condition()

    handlers = logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(passes)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(passes)


def _is_not_from_py4j(record: logging.LogRecord) -> bool:
    """Return whether a record is not from py4j, which logs each call that a dead JVM interrupts.

    The task that fails reports the end of the JVM once. SUBTLE: py4j logs an interrupted call with
    the root logger, so the name of the logger is no criterion.
    """
    return "py4j" not in Path(record.pathname).parts


def _read_choice(variable: str, choices: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, default).lower()
    if value not in choices:
        raise UsageError(
            f'value "{value}" of variable {variable} is invalid',
            hint=f"Set it to one of {', '.join(choices)}.",
        )
    return value


def _json(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _quote(value: str) -> str:
    """Return the value, in quotes if its end would be ambiguous."""
    if value and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=False)
