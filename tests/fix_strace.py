"""The program strace, which makes the system's own calls fail; missing in CI is a failure."""

import os
import shutil

import pytest


@pytest.fixture
def strace() -> str:
    found = shutil.which("strace")
    if found is None:
        message = "no strace: apt-get install strace"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found
