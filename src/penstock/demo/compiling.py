"""Compiles, in a process beside a first run, what the way to an endpoint needs.

Hot loops are compiled where they are first called, and kept on disk. In a very first run
the source's come one after another and then those of transactions, each awaited; here the
latter are called with next to nothing while the former are under way. So are those that
read a topic's records, which each of Spark's workers would compile for itself.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["compiled_beside"]

KAFKA: Final = "kafka"
"""The argument with which those of a topic are compiled, too."""


@contextmanager
def compiled_beside(*, kafka: bool = False) -> Iterator[None]:
    """Whatever runs in the block finds more and more of it compiled."""
    if _compiled(kafka):
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.demo.compiling", *([KAFKA] if kafka else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _compiled(kafka: bool) -> bool:
    """Whether an earlier run has left the last of them on disk, beside its file."""
    from penstock.sources.postgres.types import decimals

    folder = Path(decimals.__file__).parent / "__pycache__"
    found = any(folder.glob("decimals._print*.nbi"))
    if kafka:
        from penstock.sources.formats import text_kernels

        folder = Path(text_kernels.__file__).parent / "__pycache__"
        found = found and any(folder.glob("text_kernels.read_integers*.nbi"))
    return found


def main() -> None:
    """Call each once, the one that takes longest first."""
    from decimal import Decimal

    import pyarrow as pa

    from penstock.data.jit import compile_always
    from penstock.data.packed import key_hashes, pack, unpack
    from penstock.protocol import arena
    from penstock.sdk.duplicate_keys import KeyHashes
    from penstock.sources.postgres.types.decimals import print_decimals
    from penstock.sources.postgres.types.moments import print_timestamps

    compile_always()
    if KAFKA in sys.argv[1:]:
        _read_clicks()
    columns = [
        pa.array([1, None]),
        pa.array(["a", None]),
        pa.array([1.5, None]),
        pa.array([True, None]),
    ]
    # Bytes that are as packed keys are, whatever they hold.
    cells = pa.array([b"a", b"b"])
    message = arena.encode_arena(1, 1, [cells, cells, cells], [pa.array([True, False])])
    arena.decode_arena(message, 0, len(message), "a message")
    packed = pack(columns)
    unpack(packed, [column.type for column in columns])
    key_hashes(packed)
    KeyHashes().add(packed)
    print_timestamps(pa.array([0], pa.timestamp("us", "UTC")))
    print_decimals(pa.array([Decimal("1.50")]))


def _read_clicks() -> None:
    import pyarrow as pa

    from penstock.demo.clicks import COLUMNS
    from penstock.sources.formats import JsonFormat

    click = pa.array([b'{"customer": 1, "page": "/", "product": null}'])
    JsonFormat.of(COLUMNS).decode(pa.chunked_array([click]))


if __name__ == "__main__":
    main()
