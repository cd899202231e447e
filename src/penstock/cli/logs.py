"""Log lines for a terminal: the phrase, and its fields after it."""

import json
import logging

__all__ = ["FieldsFormatter", "log_to_stderr"]


class FieldsFormatter(logging.Formatter):
    """Appends the fields of a line (`telemetry.fields`) as `key=value`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name.
        """The line, before any traceback."""
        fields: dict[str, object] = getattr(record, "fields", {})
        told = (f"{name}={_plain(str(value))}" for name, value in fields.items())
        return " ".join([super().formatMessage(record), *told])


def log_to_stderr() -> None:
    """Show warnings and worse on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(FieldsFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _plain(value: str) -> str:
    """As it is, or in quotes if one could not tell where it ends."""
    if value and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=False)
