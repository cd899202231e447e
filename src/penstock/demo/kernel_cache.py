"""Cache of compiled kernels, filled by a separate process during the first run.

A hot loop is compiled at its first call, and the result is cached on disk. In the first run, the
loops of the source are compiled one after another, then the loops of transactions. Each compilation
blocks the run. This process calls the loops of transactions with minimal input while the source
compiles its own. It also calls the loops that decode records of a topic, which each Spark worker
would otherwise compile for itself.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["compile_in_background"]

KAFKA: Final = "kafka"
"""Argument that adds the loops of a topic."""


@contextmanager
def compile_in_background(*, kafka: bool = False) -> Iterator[None]:
    """Compile the hot loops in a separate process while the block runs."""
    if _is_filled(kafka):
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.demo.kernel_cache", *([KAFKA] if kafka else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _is_filled(kafka: bool) -> bool:
    """Return whether the kernel that is compiled last is on disk, next to its module."""
    from penstock.sources.postgres.types import decimals

    folder = Path(decimals.__file__).parent / "__pycache__"
    is_filled = any(folder.glob("decimals._print*.nbi"))
    if kafka:
        from penstock.data.text_kernels import kernels

        folder = Path(kernels.__file__).parent / "__pycache__"
        is_filled = is_filled and any(folder.glob("kernels.read_integers*.nbi"))
    return is_filled


def main() -> None:
    """Call each loop once, starting with the slowest to compile."""
    from decimal import Decimal

    import pyarrow as pa

    from penstock.data.jit import compile_always
    from penstock.data.packed import key_hashes, pack, unpack
    from penstock.protocol import arena
    from penstock.sdk.duplicate_keys import KeyHashes
    from penstock.sources.postgres.types.decimals import print_decimals
    from penstock.sources.postgres.types.timestamps import print_timestamps

    compile_always()
    if KAFKA in sys.argv[1:]:
        _read_clicks()
    columns = [
        pa.array([1, None]),
        pa.array(["a", None]),
        pa.array([1.5, None]),
        pa.array([True, None]),
    ]
    # Bytes of the same type as packed keys; their contents do not matter.
    values = pa.array([b"a", b"b"])
    message = arena.encode_arena(1, 1, [values, values, values], [pa.array([True, False])])
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
