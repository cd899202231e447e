"""Documents put together again from columns, where the whole document is not kept.

Text is joined, rather than asking SQLite's JSON functions, because SQLite writes
doubles with fifteen digits; `flow_text` writes them exactly. What is null is left out,
unless null is a value of the field's own.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.sql.dialect import Dialect

__all__ = ["document_expression"]


@dataclass(slots=True)
class _Node:
    """An object within a document."""

    children: "dict[str, _Node | Field]" = field(default_factory=dict)


def document_expression(dialect: Dialect, binding: Binding[Any]) -> str:
    """SQL of the document of a row, as JSON text."""
    if binding.document is not None:
        return f"t.{dialect.quoted(binding.document.name)}"
    root = _Node()
    for each in (*binding.keys, *binding.values):
        node = root
        *parents, last = [
            token.replace("~1", "/").replace("~0", "~") for token in each.ptr.split("/")[1:]
        ]
        for name in parents:
            child = node.children.setdefault(name, _Node())
            if not isinstance(child, _Node):
                break  # Its parent is a column too, which holds all of it.
            node = child
        else:
            node.children.setdefault(last, each)
    return _object(dialect, root)


def _object(dialect: Dialect, node: _Node) -> str:
    parts = []
    for name, child in node.children.items():
        label = _literal("," + _json_string(name) + ":")
        if isinstance(child, _Node):
            inner = _object(dialect, child)
            parts.append(f"CASE WHEN {inner} = '{{}}' THEN '' ELSE {label} || {inner} END")
            continue
        column = f"t.{dialect.quoted(dialect.column_name(child.name))}"
        absent = f"{label} || 'null'" if "null" in child.inference.types else "''"
        parts.append(
            f"CASE WHEN {column} IS NULL THEN {absent} ELSE {label} || {_value(child, column)} END"
        )
    return f"'{{' || substr({' || '.join(parts)}, 2) || '}}'"


def _value(field_: Field, column: str) -> str:
    match field_.kind:
        case FieldKind.BOOLEAN:
            return f"CASE {column} WHEN 0 THEN 'false' ELSE 'true' END"
        case FieldKind.INTEGER:
            return f"CAST({column} AS TEXT)"
        case FieldKind.NUMBER:
            return (
                f"CASE typeof({column}) WHEN 'real' THEN CASE {column} WHEN 9e999 THEN "
                f"'\"Infinity\"' WHEN -9e999 THEN '\"-Infinity\"' ELSE flow_text({column}) "
                f"END WHEN 'integer' THEN CAST({column} AS TEXT) "
                f"ELSE CASE {column} WHEN 'NaN' THEN '\"NaN\"' ELSE {column} END END"
            )
        case FieldKind.STRING:
            return f"json_quote({column})"
        case FieldKind.BYTES:
            return f"json_quote(flow_base64({column}))"
        case FieldKind.JSON:
            return column


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
