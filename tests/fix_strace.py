"""The program strace, which injects failing system calls; required in CI."""

import os
import shutil

import pytest


@pytest.fixture
def strace() -> str:
    path = shutil.which("strace")
    if path is None:
        message = "no strace: apt-get install strace"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
