"""Errors of standard output, such as a closed pipe or a full disk, and texts for a terminal.

Click handles a broken pipe itself and exits with 1, and an `OSError` does not name its file.
Therefore errors of standard output have a class of their own.
"""

import errno
import io
import os
import re
import sys
from typing import Final

__all__ = ["OutputFailed", "discard_output", "escape_controls", "watch_output"]

_CONTROLS: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Control characters except the newline."""


class OutputFailed(Exception):
    """Error: standard output could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(os.strerror(error.errno or 0))
        self.is_broken_pipe = error.errno == errno.EPIPE


class _Output(io.TextIOWrapper):
    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputFailed(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputFailed(error) from error


def watch_output() -> None:
    """Make standard output raise `OutputFailed` where it would raise `OSError`."""
    original = sys.stdout
    sys.stdout = _Output(
        open(original.fileno(), "wb", closefd=False),  # noqa: SIM115 - stays open
        encoding=original.encoding,
        errors=original.errors,
        line_buffering=original.isatty(),
    )


def discard_output() -> None:
    """Discard buffered output, which the interpreter would write again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def escape_controls(text: str) -> str:
    r"""Replace control characters with escapes such as `\x1b`; names of tables may have them."""
    return _CONTROLS.sub(lambda char: repr(char[0])[1:-1], text)
