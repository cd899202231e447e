"""Pipes of child processes."""

import subprocess
from typing import IO, AnyStr


def stdout_of(process: "subprocess.Popen[AnyStr]") -> IO[AnyStr]:
    """Return the output of a process that was started with `stdout=PIPE`."""
    assert process.stdout is not None
    return process.stdout
