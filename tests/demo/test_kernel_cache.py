"""Kernels of the demo, compiled in a separate process during its first run."""

import subprocess
import sys

import pytest

from penstock.demo import kernel_cache


@pytest.mark.parametrize("arguments", [(), (kernel_cache.KAFKA,)], ids=["shop", "topic"])
def test_compile_process_of_demo_exits_0_without_output(arguments: tuple[str, ...]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "penstock.demo.kernel_cache", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_compile_process_ends_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(_command: list[str], **how: object) -> subprocess.Popen[bytes]:
        process = real([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append(process)
        return process

    monkeypatch.setattr(kernel_cache, "_is_filled", lambda _kafka: False)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with kernel_cache.compile_in_background():
        assert started[0].poll() is None
    assert started[0].returncode is not None
    assert started[0].stdin is not None
    started[0].stdin.close()
