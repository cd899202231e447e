"""Documents put together again from columns, where the whole document is not kept.

Text is joined, rather than asking `json_build_object`, which keeps what is null: that
is left out here, unless null is a value of the field's own. Joining also prints
each value as its field has it: a double with all its digits, what JSON has no number
for by its name, bytes in base 64, and a value of one of Postgres' own types as Postgres
prints it. That is what `concat` gives; a cast to text may be somebody's own.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from penstock.connectors.postgres.dialect import PostgresDialect, literal, moment
from penstock.sdk.bindings import Binding, Field, FieldKind
from penstock.sdk.sql.document_columns import Node, document_tree

__all__ = ["document_expression"]

ARGUMENTS: Final = 90
"""So many a function of Postgres surely takes."""


def document_expression(dialect: PostgresDialect, binding: Binding[Any]) -> str:
    """SQL of the document of a row of `t`, as JSON text."""
    if binding.document is not None:
        return f"t.{dialect.quoted(dialect.column_name(binding.document.name))}::text"
    root = document_tree((*binding.keys, *binding.values))
    whole = f"'{{' || {_members(dialect, root)} || '}}'"
    if root.field is None or root.field.kind is not FieldKind.JSON:
        return whole
    column = f"t.{dialect.quoted(dialect.column_name(root.field.name))}"
    return f"COALESCE({_value(dialect, root.field, column)}, {whole})"


def _members(dialect: PostgresDialect, node: Node) -> str:
    """SQL of what is between the braces."""
    parts = []
    for name, child in node.children.items():
        values = []
        if (found := child.field) is not None:
            column = f"t.{dialect.quoted(dialect.column_name(found.name))}"
            values.append(_value(dialect, found, column))
        if child.children:
            values.append(f"'{{' || NULLIF({_members(dialect, child)}, '') || '}}'")
        if found is not None and "null" in found.inference.types:
            values.append("'null'")
        value = values[0] if len(values) == 1 else f"COALESCE({', '.join(values)})"
        parts.append(f"{literal(json.dumps(name, ensure_ascii=False) + ':')} || {value}")
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    """SQL of those that are not null, with commas between them."""
    if len(parts) <= ARGUMENTS:
        return f"concat_ws(',', {', '.join(parts)})"
    size = -(-len(parts) // ARGUMENTS)
    groups = [parts[begin : begin + size] for begin in range(0, len(parts), size)]
    return _joined([f"NULLIF({_joined(each)}, '')" for each in groups])


def _value(dialect: PostgresDialect, field_: Field, column: str) -> str:
    """SQL of a value as JSON; null, if there is none."""
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
        case FieldKind.STRING if dialect.kept_type(field_):
            # SUBTLE: `IS NULL` is true of a row of nulls, and `concat` makes text of null.
            return (
                f"CASE WHEN {column} IS DISTINCT FROM NULL THEN to_json(concat({column}))::text END"
            )
        case FieldKind.STRING:
            return f"to_json({_text(dialect, field_, column)})::text"


def _text(dialect: PostgresDialect, field_: Field, column: str) -> str:
    match dialect.column_type(field_):
        case "TIMESTAMPTZ":
            return moment(column)
        case "TIME":
            return f"{column}::text || 'Z'"
        case _:
            return f"{column}::text"
