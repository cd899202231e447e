"""The program strace, which injects failing system calls; required in CI."""

import shutil

import pytest

from tests.services import report_missing


@pytest.fixture
def strace() -> str:
    path = shutil.which("strace")
    if path is None:
        report_missing("no strace: apt-get install strace")
    return path
