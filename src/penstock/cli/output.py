"""Errors of standard output: a closed pipe, or a full disk.

Click handles a broken pipe itself and exits with 1, and an `OSError` does not name its file.
Therefore errors of standard output have a class of their own.
"""

import errno
import io
import os
import sys

__all__ = ["OutputFailed", "discard_output", "watch_output"]


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
