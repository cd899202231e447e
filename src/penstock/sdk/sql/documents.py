"""Documents put together again from columns, where the whole document is not kept.

By columns, not by rows: each field becomes a column of JSON text, and the columns are
joined. A double is written as short as it can be read again exactly. What is null is
left out, unless null is a value of the field's own.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sdk.bindings import Binding, Field, FieldKind

__all__ = ["Assembly"]

ESCAPED: Final = r'["\\\x00-\x1f]'
"""What cannot stand in a JSON string as it is."""


@dataclass(slots=True)
class _Node:
    """An object within a document."""

    children: "dict[str, _Node | int]" = field(default_factory=dict)
    """By name: another object, or which field it is."""


class Assembly:
    """How the documents of a binding are put together from its keys and values."""

    def __init__(self, binding: Binding[Any]) -> None:
        self._fields = (*binding.keys, *binding.values)
        self._root = _Node()
        for index, each in enumerate(self._fields):
            node = self._root
            *parents, last = [
                token.replace("~1", "/").replace("~0", "~") for token in each.ptr.split("/")[1:]
            ]
            for name in parents:
                child = node.children.setdefault(name, _Node())
                if not isinstance(child, _Node):
                    break  # Its parent is a column too, which holds all of it.
                node = child
            else:
                node.children.setdefault(last, index)

    def documents(self, columns: Sequence[Sequence[Any]]) -> pa.BinaryArray:
        """A document for each row of `columns`, which are in the order of keys and values."""
        texts = [_text(each, values) for each, values in zip(self._fields, columns, strict=True)]
        return self._object(self._root, texts)

    def _object(self, node: _Node, texts: Sequence[pa.Array]) -> pa.BinaryArray:
        parts = []
        for name, child in node.children.items():
            label = b"," + json.dumps(name, ensure_ascii=False).encode() + b":"
            if isinstance(child, _Node):
                text = self._object(child, texts)
                part = pc.binary_join_element_wise(label, text, b"")
                parts.append(pc.if_else(pc.equal(text, b"{}"), b"", part))
                continue
            text = texts[child]
            part = pc.binary_join_element_wise(label, text, b"")
            if text.null_count:
                null = "null" in self._fields[child].inference.types
                part = pc.fill_null(part, label + b"null" if null else b"")
            parts.append(part)
        joined = pc.binary_join_element_wise(b"{", *parts, b"}", b"")
        # What comes first may be absent, so the comma before it is taken away at the end.
        return pc.replace_substring(joined, b"{,", b"{", max_replacements=1)


def _text(field_: Field, values: Sequence[Any]) -> pa.Array:
    """A column of JSON, as bytes; null where there is no value."""
    match field_.kind:
        case FieldKind.BOOLEAN:
            flags = pa.array(values, pa.int8()).cast(pa.bool_())
            return pc.if_else(flags, b"true", b"false")
        case FieldKind.INTEGER | FieldKind.NUMBER:
            return _numbers(values, whole=field_.kind is FieldKind.INTEGER)
        case FieldKind.STRING:
            return _strings(pa.array(values, pa.string()))
        case FieldKind.BYTES:
            texts = [None if each is None else base64.b64encode(each).decode() for each in values]
            return _strings(pa.array(texts, pa.string()))
        case FieldKind.JSON:
            return pa.array(values, pa.string()).cast(pa.binary())


def _numbers(values: Sequence[Any], *, whole: bool) -> pa.Array:
    try:
        found = pa.array(values, pa.int64() if whole else pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        found = None
    if found is not None and not whole:
        content = pc.fill_null(found, 1.0).to_numpy(zero_copy_only=False)
        # Arrow writes -0.0 as a whole number, and JSON has no infinities.
        if not np.isfinite(content).all() or (np.signbit(content) & (content == 0)).any():
            found = None
    if found is None:
        return pa.array([_number(each) for each in values], pa.binary())
    return found.cast(pa.string()).cast(pa.binary())


def _number(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, float) and (value != value or value in (np.inf, -np.inf)):
        return b'"NaN"' if value != value else b'"Infinity"' if value > 0 else b'"-Infinity"'
    if value == "NaN":
        return b'"NaN"'
    return (value if isinstance(value, str) else repr(value)).encode()


def _strings(texts: pa.StringArray) -> pa.Array:
    if pc.any(pc.match_substring_regex(texts, ESCAPED)).as_py():
        return pa.array(
            [
                None if each is None else json.dumps(each, ensure_ascii=False).encode()
                for each in texts.to_pylist()
            ],
            pa.binary(),
        )
    return pc.binary_join_element_wise(b'"', texts.cast(pa.binary()), b'"', b"")
