"""Standard output that may fail: whoever reads it has gone, or the disk is full.

Click takes a broken pipe for its own affair and exits with 1, and an `OSError`
does not say whose it is; so trouble with the output has an error of its own.
"""

import errno
import io
import os
import sys

__all__ = ["OutputFailed", "give_up_output", "watch_output"]


class OutputFailed(Exception):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(os.strerror(error.errno or 0))
        self.reader_gone = error.errno == errno.EPIPE


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
    before = sys.stdout
    sys.stdout = _Output(
        open(before.fileno(), "wb", closefd=False),  # noqa: SIM115 - a handle, kept open.
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.isatty(),
    )


def give_up_output() -> None:
    """Throw away what waits, or the interpreter would try it again and say so as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
