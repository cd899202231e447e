"""Log lines: the phrase, and its fields after it; or one JSON object a line, for machines."""

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
    """Appends the fields of a line (`telemetry.fields`) as `key=value`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name.
        """The line, before any traceback."""
        fields: dict[str, object] = getattr(record, "fields", {})
        told = (f"{name}={_plain(str(value))}" for name, value in fields.items())
        return " ".join([super().formatMessage(record), *told])


class JsonFormatter(logging.Formatter):
    """A line as one object: time, level, room, message, and the fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, object] = getattr(record, "fields", {})
        said = {
            **{name: _json(value) for name, value in fields.items()},
            "time_ms": int(record.created * 1_000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def log_to_stderr() -> None:
    """Show warnings and worse on standard error, unless the environment says otherwise.

    Raises:
        UsageError: it says what does not exist.
    """
    style = _chosen(FORMAT, ("text", "json"), "text")
    level = _chosen(LEVEL, LEVELS, "warning")
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
    """Return whether a record is not one of py4j, which logs each call that a dead JVM cut off.

    The end of the JVM is reported once, by the task that it failed. SUBTLE: py4j logs a cut
    call with the root logger, so the name of the logger does not tell.
    """
    return "py4j" not in Path(record.pathname).parts


def _chosen(variable: str, choices: tuple[str, ...], default: str) -> str:
    said = os.environ.get(variable, default).lower()
    if said not in choices:
        raise UsageError(
            f'variable {variable} is "{said}"', hint=f"Set it to one of {', '.join(choices)}."
        )
    return said


def _json(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _plain(value: str) -> str:
    """As it is, or in quotes if one could not tell where it ends."""
    if value and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=False)
