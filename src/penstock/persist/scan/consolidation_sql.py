"""SQL text that consolidates updates and joins rows by key. Pure.

Spark's equality differs from the equality of rows here: Spark treats 0.0 and -0.0 as equal,
and grouping by a map sorts it and turns its nulls into values. Therefore such a column gets
a *mark*, a second column that distinguishes its values. Maps are grouped as lists of their
entries. After grouping, the original values are restored.

The module returns text instead of Spark expressions: each expression costs several calls to
the JVM, and a plan has many.
"""

from dataclasses import dataclass

import pyarrow as pa

from penstock.data import DIFF

__all__ = ["ConsolidationSql", "quoted"]


def quoted(name: str) -> str:
    """Return a column name quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, slots=True)
class ConsolidationSql:
    """Expressions that consolidate updates of `columns`, which have Spark's types.

    Select `prepared`, group by `by`, aggregate `sums`, then select `back`. The result has
    each row once, with the sum of its diffs.
    """

    columns: pa.Schema

    @property
    def own(self) -> str:
        """Prefix of generated column names, which no column of the collection has."""
        taken = [name.lower() for name in self.columns.names]
        own = "mz_"
        while any(name.startswith(own) for name in taken):
            own += "_"
        return own

    @property
    def names(self) -> list[str]:
        """Quoted column names."""
        return [quoted(name) for name in self.columns.names]

    @property
    def prepared(self) -> list[str]:
        """Columns to select before grouping: values, grouping columns and the diff."""
        chosen = list(self.names)
        for i, field in enumerate(self.columns):
            if _holds_map(field.type):
                chosen.append(f"{_listed(quoted(field.name), field.type)} AS {self.own}plain{i}")
            if mark := _mark(field):
                chosen.append(f"{mark} AS {self.own}mark{i}")
        return [*chosen, DIFF]

    @property
    def by(self) -> list[str]:
        """Grouping columns among `prepared`."""
        chosen: list[str] = []
        for i, field in enumerate(self.columns):
            chosen.append(f"{self.own}plain{i}" if _holds_map(field.type) else quoted(field.name))
            if _mark(field):
                chosen.append(f"{self.own}mark{i}")
        return chosen

    @property
    def sums(self) -> list[str]:
        """Aggregates."""
        firsts = [
            f"first({quoted(field.name)}) AS {self.own}first{i}"
            for i, field in enumerate(self.columns)
            if _mark(field) and pa.types.is_nested(field.type)
        ]
        return [f"sum({DIFF}) AS {DIFF}", *firsts]

    @property
    def back(self) -> list[str]:
        """Columns to select after grouping: the original values and the sum of diffs."""
        chosen: list[str] = []
        for i, field in enumerate(self.columns):
            name = quoted(field.name)
            if not _mark(field):
                chosen.append(name)
            elif pa.types.is_nested(field.type):
                chosen.append(f"{self.own}first{i} AS {name}")
            else:
                zero = "CAST('-0.0' AS " + ("FLOAT" if field.type.bit_width == 32 else "DOUBLE")
                chosen.append(
                    f"CASE WHEN {self.own}mark{i} = '-0.0' THEN {zero}) ELSE {name} END AS {name}"
                )
        return [*chosen, DIFF]

    def joinable(self, key: tuple[str, ...]) -> bool:
        """Return whether Spark can join on `key`, which must not contain a map."""
        return not any(_holds_map(self.columns.field(name).type) for name in key)

    def key_columns(self, key: tuple[str, ...]) -> list[str]:
        """Return the key as columns under generated names, for `same_key`."""
        return [f"{value} AS {self.own}key{i}" for i, (value, _) in enumerate(self._identity(key))]

    def same_key(self, key: tuple[str, ...]) -> str:
        """Return the join condition that the key equals `key_columns`, where null equals null.

        SUBTLE: `<=>` on an integer joins by the value and by a null flag. The two no longer
        fit into one number, which halves the speed. Therefore the join uses the value
        alone, and a filter on the matches checks for null.
        """
        terms: list[str] = []
        for i, (mine, whole) in enumerate(self._identity(key)):
            other = f"{self.own}key{i}"
            if not whole:
                terms.append(f"{mine} <=> {other}")
                continue
            terms.append(f"coalesce({mine}, 0) = coalesce({other}, 0)")
            neither = f"{mine} IS NOT NULL AND {other} IS NOT NULL"
            terms.append(f"(({mine} IS NULL AND {other} IS NULL) OR ({neither}))")
        return " AND ".join(terms)

    def _identity(self, key: tuple[str, ...]) -> list[tuple[str, bool]]:
        """Return expressions that are equal exactly for equal keys, each with an integer flag."""
        columns: list[tuple[str, bool]] = []
        for field in (self.columns.field(name) for name in key):
            columns.append((quoted(field.name), pa.types.is_integer(field.type)))
            if mark := _mark(field):
                columns.append((mark, False))
        return columns


def _mark(field: pa.Field) -> str:
    """Return an expression that distinguishes values that Spark treats as equal; else empty."""
    column = quoted(field.name)
    if pa.types.is_floating(field.type):
        return f"CASE WHEN {column} = 0 THEN CAST({column} AS STRING) END"
    if pa.types.is_nested(field.type) and (_holds_map(field.type) or _holds_float(field.type)):
        return f"CAST({column} AS STRING)"
    return ""


def _listed(value: str, kind: pa.DataType, depth: int = 0) -> str:
    """Return the value with lists of entries in place of maps."""
    if not _holds_map(kind):
        return value
    if pa.types.is_struct(kind):
        pairs: list[str] = []
        for inner in kind:
            own = _listed(f"{value}.{quoted(inner.name)}", inner.type, depth)
            pairs.append(f"'{_escaped(inner.name)}', {own}")
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(pairs)}) END"
    if pa.types.is_map(kind):
        entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        value, element = f"map_entries({value})", entry
        if not _holds_map(entry):
            return value
    else:
        element = kind.value_type
    each = f"each{depth}"
    return f"transform({value}, {each} -> {_listed(each, element, depth + 1)})"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _holds_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_holds_map(inner) for inner in _inner(kind))


def _holds_float(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or any(_holds_float(inner) for inner in _inner(kind))


def _inner(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.key_type, kind.item_type]
    return [kind.field(i).type for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []
