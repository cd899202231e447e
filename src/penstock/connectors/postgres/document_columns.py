"""SQL that assembles documents from columns, for tables without the root document.

The SQL concatenates text. `json_build_object` would include nulls, which are omitted here unless
the type of the field includes null. Concatenation also controls the text of values: doubles have
all digits, NaN and infinities are strings, bytes are base64. Values of Postgres types have the text
that Postgres prints, by `concat`, because a user can redefine a cast to text.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from penstock.connectors.postgres.dialect import PostgresDialect, timestamp_text
from penstock.pgclient import quote_literal
from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.sql.document_columns import Node, document_tree

__all__ = ["document_expression"]

ARGUMENTS: Final = 90
"""Maximum number of arguments of a function, below the limit of Postgres (100)."""


def document_expression(dialect: PostgresDialect, binding: Binding[Any]) -> str:
    """Return SQL for the document of a row of `t`, as JSON text."""
    if binding.document is not None:
        return f"t.{dialect.quoted(dialect.column_name(binding.document.name))}::text"
    root = document_tree((*binding.keys, *binding.values))
    assembled = f"'{{' || {_members(dialect, root)} || '}}'"
    if root.field is None or root.field.kind is not FieldKind.JSON:
        return assembled
    column = f"t.{dialect.quoted(dialect.column_name(root.field.name))}"
    return f"COALESCE({_value(dialect, root.field, column)}, {assembled})"


def _members(dialect: PostgresDialect, node: Node) -> str:
    """Return SQL for the text between the braces."""
    parts = []
    for name, child in node.children.items():
        values = []
        if (selected := child.field) is not None:
            column = f"t.{dialect.quoted(dialect.column_name(selected.name))}"
            values.append(_value(dialect, selected, column))
        if child.children:
            values.append(f"'{{' || NULLIF({_members(dialect, child)}, '') || '}}'")
        if selected is not None and "null" in selected.inference.types:
            values.append("'null'")
        value = values[0] if len(values) == 1 else f"COALESCE({', '.join(values)})"
        parts.append(f"{quote_literal(json.dumps(name, ensure_ascii=False) + ':')} || {value}")
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    """Return SQL that joins the parts that are not null with commas."""
    if len(parts) <= ARGUMENTS:
        return f"concat_ws(',', {', '.join(parts)})"
    size = -(-len(parts) // ARGUMENTS)
    groups = [parts[begin : begin + size] for begin in range(0, len(parts), size)]
    return _joined([f"NULLIF({_joined(group)}, '')" for group in groups])


def _value(dialect: PostgresDialect, field_: Field, column: str) -> str:
    """Return SQL for a value as JSON; null if there is none."""
    match field_.kind:
        case FieldKind.BOOLEAN:
            return f"CASE WHEN {column} THEN 'true' WHEN NOT {column} THEN 'false' END"
        case FieldKind.INTEGER | FieldKind.JSON:
            return f"{column}::text"
        case FieldKind.NUMBER:
            return (
                f"CASE WHEN {column}::text IN ('NaN', 'Infinity', '-Infinity') "
                f"THEN to_json({column}::text)::text ELSE {column}::text END"
            )
        case FieldKind.BYTES:
            return f"'\"' || translate(encode({column}, 'base64'), E'\\n', '') || '\"'"
        case FieldKind.STRING if dialect.annotated_type(field_):
            # SUBTLE: `IS NULL` is true for a row of nulls, and `concat` converts null to text.
            return (
                f"CASE WHEN {column} IS DISTINCT FROM NULL THEN to_json(concat({column}))::text END"
            )
        case FieldKind.STRING:
            return f"to_json({_text(dialect, field_, column)})::text"


def _text(dialect: PostgresDialect, field_: Field, column: str) -> str:
    match dialect.column_type(field_):
        case "TIMESTAMPTZ":
            return timestamp_text(column)
        case "TIME":
            return f"{column}::text || 'Z'"
        case _:
            return f"{column}::text"
