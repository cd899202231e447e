"""Loading of compiled code before the first document arrives.

Otherwise the first batch would wait about two seconds for it.
"""

import pyarrow as pa

from penstock.data.jit import compile_always
from penstock.data.packed import pack, unpack
from penstock.protocol.messages import Store
from penstock.protocol.wire import decode_request, encode_request

__all__ = ["warm"]


def warm() -> None:
    """Load all code that processes documents, by processing two of them."""
    compile_always()
    columns = [
        pa.array([1, None], pa.int64()),
        pa.array(["a", None], pa.string()),
        pa.array([1.5, None], pa.float64()),
        pa.array([True, None], pa.bool_()),
    ]
    packed = pack(columns)
    unpack(packed, [column.type for column in columns])
    none = pa.array([False, False])
    decode_request(encode_request(Store(0, packed, packed, packed, none, none)))
