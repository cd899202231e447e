"""Documents assembled from columns, for tables without a column for the root document.

The work is columnar: each field becomes a column of JSON text, and the columns are concatenated.
A double is written with the fewest digits that restore it exactly. Nulls are omitted, unless the
type of the field includes null.

The columns of two fields may overlap, if one location contains the other. The outer column has
precedence. Where it is null, as in rows that were stored before it was selected, the inner columns
are used. The outermost location is the root document, which may have a field name of its own.
"""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sdk.bindings import Binding, Field, FieldKind

__all__ = ["Assembly", "Node", "document_tree", "double_text"]


@dataclass(slots=True)
class Node:
    """Location in a document."""

    children: "dict[str, Node]" = field(default_factory=dict)
    """Locations of properties, by name."""

    field: Field | None = None
    """Field whose column has the value."""

    index: int = -1
    """Index of the field."""


def document_tree(fields: Sequence[Field]) -> Node:
    """Return the tree of locations. Of two fields at one location, the first is used."""
    root = Node()
    for index, selected in enumerate(fields):
        node = root
        for token in selected.ptr.split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            node = node.children.setdefault(name, Node())
        if node.field is None:
            node.field, node.index = selected, index
    return root


class Assembly:
    """Assembles the documents of a binding from its keys and values."""

    def __init__(self, binding: Binding[Any]) -> None:
        self._fields = (*binding.keys, *binding.values)
        self._root = document_tree(self._fields)

    def documents(self, columns: Sequence[Sequence[Any]]) -> pa.BinaryArray:
        """Return one document for each row of `columns`, which are keys and then values."""
        text, root = _object(self._root, columns), self._root
        if root.field is not None and root.field.kind is FieldKind.JSON:
            text = pc.coalesce(_text(root.field, columns[root.index])[0], text)
        return text.cast(pa.binary())


def _object(node: Node, columns: Sequence[Sequence[Any]]) -> pa.StringArray:
    """Return JSON objects as text."""
    members = [(name, *_value(child, columns)) for name, child in node.children.items()]
    # A property without nulls first: then all others follow a comma.
    members.sort(key=lambda member: member[1].null_count > 0)
    first_is_set = not members[0][1].null_count
    parts: list[pa.StringArray | str] = []
    for name, text, quote in members:
        comma = "" if first_is_set and not parts else ","
        label = f"{comma}{json.dumps(name, ensure_ascii=False)}:{quote}"
        if text.null_count:
            parts.append(pc.fill_null(pc.binary_join_element_wise(label, text, quote, ""), ""))
        else:
            parts += [label, text, quote]
    if not first_is_set:
        parts = [pc.binary_replace_slice(pc.binary_join_element_wise(*parts, ""), 0, 1, "")]
    return pc.binary_join_element_wise("{", *parts, "}", "")


def _value(node: Node, columns: Sequence[Sequence[Any]]) -> tuple[pa.StringArray, str]:
    """Return the JSON text at a location, and the quote to put around it."""
    text, quote = None, ""
    if node.field is not None:
        text, quote = _text(node.field, columns[node.index])
    if node.children:
        within = _object(node, columns)
        within = pc.if_else(pc.equal(within, "{}"), pa.scalar(None, pa.string()), within)
        if text is not None and quote:
            text, quote = pc.binary_join_element_wise(quote, text, quote, ""), ""
        text = within if text is None else pc.coalesce(text, within)
    assert text is not None
    if text.null_count and node.field is not None and "null" in node.field.inference.types:
        text, quote = pc.binary_join_element_wise(quote, text, quote, ""), ""
        text = pc.fill_null(text, "null")
    return text, quote


def _text(field_: Field, values: Sequence[Any]) -> tuple[pa.StringArray, str]:
    """Return a column as JSON text, with nulls, and the quote to put around it."""
    match field_.kind:
        case FieldKind.BOOLEAN:
            return pa.array(values, pa.int8()).cast(pa.bool_()).cast(pa.string()), ""
        case FieldKind.INTEGER | FieldKind.NUMBER:
            return _numbers(values, integral=field_.kind is FieldKind.INTEGER), ""
        case FieldKind.STRING:
            return _escape(pa.array(values, pa.string())), '"'
        case FieldKind.BYTES:
            texts = [
                None if value is None else base64.b64encode(value).decode() for value in values
            ]
            return pa.array(texts, pa.string()), '"'
        case FieldKind.JSON:
            return pa.array(values, pa.string()), ""


def _numbers(values: Sequence[Any], *, integral: bool) -> pa.StringArray:
    try:
        # SUBTLE: with an integer type, Arrow would truncate fractions.
        numbers = pa.array(values, None if integral else pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return _numbers_singly(values)
    if integral and numbers.type not in (pa.int64(), pa.null()):
        return _numbers_singly(values)
    if not integral:
        content = pc.fill_null(numbers, 1.0).to_numpy(zero_copy_only=False)
        # Arrow writes -0.0 as an integer, and JSON has no infinities.
        if not np.isfinite(content).all() or (np.signbit(content) & (content == 0)).any():
            return _numbers_singly(values)
    return numbers.cast(pa.string())


def _numbers_singly(values: Sequence[Any]) -> pa.StringArray:
    return pa.array([_number(value) for value in values], pa.string())


def _number(value: Any) -> str | None:
    if value is None:
        return None
    text = double_text(value) if isinstance(value, float) else str(value)
    return f'"{text}"' if text in ("NaN", "Infinity", "-Infinity") else text


def double_text(value: float) -> str:
    """Return the shortest exact text of a double; for values outside JSON, their name."""
    if not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return repr(value).removesuffix(".0") if value else repr(value)


def _escape(texts: pa.StringArray) -> pa.StringArray:
    """Return the contents of JSON strings, without quotes."""
    data = texts.buffers()[2]
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0)
    if not ((content < ord(" ")) | (content == ord('"')) | (content == ord("\\"))).any():
        return texts
    return pa.array(
        [
            None if text is None else json.dumps(text, ensure_ascii=False)[1:-1]
            for text in texts.to_pylist()
        ],
        pa.string(),
    )
