"""Compiled code, loaded before it is needed.

A connector that many documents will come to spends two seconds on that with the first of
them, while whoever sends them waits. Loaded ahead, it costs nobody anything.
"""

import pyarrow as pa

from penstock.data.jit import compile_always
from penstock.data.packed import pack, unpack
from penstock.protocol.messages import Store
from penstock.protocol.wire import decode_request, encode_request

__all__ = ["warm"]


def warm() -> None:
    """Walk a few documents through what every document passes."""
    compile_always()
    columns = [
        pa.array([1, None], pa.int64()),
        pa.array(["a", None], pa.string()),
        pa.array([1.5, None], pa.float64()),
        pa.array([True, None], pa.bool_()),
    ]
    packed = pack(columns)
    unpack(packed, [each.type for each in columns])
    none = pa.array([False, False])
    decode_request(encode_request(Store(0, packed, packed, packed, none, none)))
