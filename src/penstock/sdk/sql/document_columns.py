"""Documents put together again from columns, where the whole document is not kept.

By columns, not by rows: each field becomes a column of JSON text, and the columns are
joined. A double is written as short as it can be read again exactly. What is null is
left out, unless null is a value of the field's own.

A location may have a column and lie within another that has one, too: then the outer
one, which holds all of it, is told; the inner ones, where it is null, as it is in rows
that were stored before it was selected. The outermost is the document itself, which may
be selected under another name than that of the document column.
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

__all__ = ["Assembly", "Node", "double_text", "outline"]


@dataclass(slots=True)
class Node:
    """A location within a document."""

    children: "dict[str, Node]" = field(default_factory=dict)
    """By name."""

    field: Field | None = None
    """The one whose column has its value."""

    index: int = -1
    """Which of the fields that is."""


def outline(fields: Sequence[Field]) -> Node:
    """The document that these fields make; of two at one location the first is taken."""
    root = Node()
    for index, each in enumerate(fields):
        node = root
        for token in each.ptr.split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            node = node.children.setdefault(name, Node())
        if node.field is None:
            node.field, node.index = each, index
    return root


class Assembly:
    """How the documents of a binding are put together from its keys and values."""

    def __init__(self, binding: Binding[Any]) -> None:
        self._fields = (*binding.keys, *binding.values)
        self._root = outline(self._fields)

    def documents(self, columns: Sequence[Sequence[Any]]) -> pa.BinaryArray:
        """A document for each row of `columns`, which are in the order of keys and values."""
        text, root = _object(self._root, columns), self._root
        if root.field is not None and root.field.kind is FieldKind.JSON:
            text = pc.coalesce(_text(root.field, columns[root.index])[0], text)
        return text.cast(pa.binary())


def _object(node: Node, columns: Sequence[Sequence[Any]]) -> pa.StringArray:
    """Objects, as text."""
    members = [(name, *_value(child, columns)) for name, child in node.children.items()]
    # One that is always there first, so that the others surely have something before them.
    members.sort(key=lambda member: member[1].null_count > 0)
    sure = not members[0][1].null_count
    parts: list[pa.StringArray | str] = []
    for name, text, quote in members:
        comma = "" if sure and not parts else ","
        label = f"{comma}{json.dumps(name, ensure_ascii=False)}:{quote}"
        if text.null_count:
            parts.append(pc.fill_null(pc.binary_join_element_wise(label, text, quote, ""), ""))
        else:
            parts += [label, text, quote]
    if not sure:
        parts = [pc.binary_replace_slice(pc.binary_join_element_wise(*parts, ""), 0, 1, "")]
    return pc.binary_join_element_wise("{", *parts, "}", "")


def _value(node: Node, columns: Sequence[Sequence[Any]]) -> tuple[pa.StringArray, str]:
    """What is at a location, as the text of its JSON, and what to put around it."""
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
    """A column of JSON, null where there is no value, and what to put around it."""
    match field_.kind:
        case FieldKind.BOOLEAN:
            return pa.array(values, pa.int8()).cast(pa.bool_()).cast(pa.string()), ""
        case FieldKind.INTEGER | FieldKind.NUMBER:
            return _numbers(values, whole=field_.kind is FieldKind.INTEGER), ""
        case FieldKind.STRING:
            return _escaped(pa.array(values, pa.string())), '"'
        case FieldKind.BYTES:
            texts = [None if each is None else base64.b64encode(each).decode() for each in values]
            return pa.array(texts, pa.string()), '"'
        case FieldKind.JSON:
            return pa.array(values, pa.string()), ""


def _numbers(values: Sequence[Any], *, whole: bool) -> pa.StringArray:
    try:
        # SUBTLE: told to make integers, Arrow would cut fractions off.
        found = pa.array(values, None if whole else pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return _each_number(values)
    if whole and found.type not in (pa.int64(), pa.null()):
        return _each_number(values)
    if not whole:
        content = pc.fill_null(found, 1.0).to_numpy(zero_copy_only=False)
        # Arrow writes -0.0 as a whole number, and JSON has no infinities.
        if not np.isfinite(content).all() or (np.signbit(content) & (content == 0)).any():
            return _each_number(values)
    return found.cast(pa.string())


def _each_number(values: Sequence[Any]) -> pa.StringArray:
    return pa.array([_number(each) for each in values], pa.string())


def _number(value: Any) -> str | None:
    if value is None:
        return None
    text = double_text(value) if isinstance(value, float) else str(value)
    return f'"{text}"' if text in ("NaN", "Infinity", "-Infinity") else text


def double_text(value: float) -> str:
    """A double as short as it can be read again exactly; by its name, if JSON has none such."""
    if not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return repr(value).removesuffix(".0") if value else repr(value)


def _escaped(texts: pa.StringArray) -> pa.StringArray:
    """What stands between the quotes of JSON strings."""
    data = texts.buffers()[2]
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0)
    if not ((content < ord(" ")) | (content == ord('"')) | (content == ord("\\"))).any():
        return texts
    return pa.array(
        [
            None if each is None else json.dumps(each, ensure_ascii=False)[1:-1]
            for each in texts.to_pylist()
        ],
        pa.string(),
    )
