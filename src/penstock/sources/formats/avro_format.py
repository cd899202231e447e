"""Avro format: records of a fixed reader schema, for any compatible writer schema.

With a registry, the first five bytes of a record identify its writer schema. Without one, all
records have one given writer schema. The columns are determined once, by the reader schema.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import pyarrow as pa

from penstock.data.text_kernels.located_values import InvalidValue
from penstock.errors import UsageError
from penstock.sources.formats.avro_schema import (
    MALFORMED,
    check_meaning,
    definitions,
    parsed_schema,
    whole_schema,
)
from penstock.sources.formats.avro_types import Kind, kind_of
from penstock.sources.formats.column_types import check_columns
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.formats.schema_registry import NoSuchSchema, Registered, Registry

__all__ = ["AvroFormat"]

VALUE: Final = "value"
"""Column name for a schema that is not a record."""


@dataclass(frozen=True, slots=True)
class AvroFormat:
    """Avro records, resolved to the schema `reader`."""

    reader: str
    """Schema whose fields are the columns, as JSON."""

    writer: str | None = None
    """Writer schema of all records, if it differs and there is no registry."""

    registry: Registry | None = None
    """Registry that resolves the schema ids in the records."""

    reader_references: tuple[tuple[str, Registered], ...] = ()
    """Schemas that `reader` names and does not contain."""

    schema: pa.Schema = field(init=False)
    _cache: dict[Any, Any] = field(init=False, repr=False, compare=False)
    """Cache of parsed schemas; not pickled, but built again."""

    def __post_init__(self) -> None:
        if self.writer is not None and self.registry is not None:
            raise UsageError(
                "avro format has a writer's schema and a registry",
                hint="Leave the schema out: records of a registry say what wrote them.",
            )
        object.__setattr__(self, "_cache", {})
        plan = self._plan()
        fields = [pa.field(name, kind.arrow) for name, kind in plan.columns]
        schema = check_columns(pa.schema(fields), owner="avro format")
        object.__setattr__(self, "schema", schema)
        if self.writer is not None:
            whole = _given(self.writer, (), "writer's schema of avro format")
            try:
                check_meaning(whole, plan.whole)
            except InvalidValue as invalid:
                raise UsageError(
                    f"writer's schema of avro format cannot be read as the reader's: {invalid}",
                    hint="Give the type that the writer has.",
                ) from None
            self._cache["writer"] = parsed_schema(whole)

    @classmethod
    def of(cls, registered: Registered, registry: Registry) -> Self:
        """Create the format for a schema of the registry, such as the latest of a subject."""
        return cls(registered.schema, registry=registry, reader_references=registered.references)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.reader, self.writer, self.registry, self.reader_references

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        names = ("reader", "writer", "registry", "reader_references")
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`.

        Raises:
            TransientError: the registry could not return a schema.
            DefiniteError: the registry rejects the request.
        """
        plan = self._plan()
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            reasons: dict[int, str] = {}
            rows = [self._read(value, row, reasons) for row, value in enumerate(chunk.to_pylist())]
            columns = [
                kind.array([None if row is None else row[name] for row in rows], name, reasons)
                for name, kind in plan.columns
            ]
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _read(self, value: bytes | None, row: int, bad: dict[int, str]) -> Any:
        """Return one record as a mapping from names to values; None if it is null or bad."""
        if value is None:
            return None
        try:
            return self._datum(value)
        except InvalidValue as invalid:
            bad[row] = str(invalid)
            return None

    def _datum(self, value: bytes) -> Any:
        # Deferred: the package belongs to an extra.
        import fastavro
        from fastavro.read import SchemaResolutionError

        plan, start, written_with = self._plan(), 0, "its schema"
        writer = self._cache.get("writer", plan.parsed)
        if self.registry is not None:
            if len(value) < 5 or value[0] != 0:
                raise InvalidValue("it does not begin with a zero byte and the id of a schema")
            start, id = 5, int.from_bytes(value[1:5], "big")
            writer, written_with = self._writer(id), f"schema id {id}"
        data = io.BytesIO(value)
        data.seek(start)
        try:
            datum = fastavro.schemaless_reader(
                data, writer, None if writer is plan.parsed else plan.parsed
            )
        except SchemaResolutionError:
            raise InvalidValue(f"{written_with}, which wrote it, cannot be read as ours") from None
        except MALFORMED:
            raise InvalidValue(f"it is not Avro of {written_with}") from None
        if trailing := len(value) - data.tell():
            raise InvalidValue(f"it is not Avro of {written_with}: {trailing} bytes follow")
        return datum if plan.record else {VALUE: datum}

    def _writer(self, id: int) -> Any:
        assert self.registry is not None
        known = self._cache.get(id)
        if known is None:
            try:
                registered = self.registry.by_id(id)
                if registered.kind != "AVRO":
                    raise InvalidValue(f"it is {registered.kind}, and not Avro")
                whole = whole_schema(registered.schema, registered.references)
                check_meaning(whole, self._plan().whole)
                known = parsed_schema(whole)
            except NoSuchSchema:
                known = InvalidValue(f"schema id {id} does not exist in the registry")
            except InvalidValue as invalid:
                known = InvalidValue(
                    f"schema id {id}, which wrote it, cannot be read as ours: {invalid}"
                )
            self._cache[id] = known
        if isinstance(known, InvalidValue):
            raise InvalidValue(str(known))
        return known

    def _plan(self) -> "_Plan":
        if "plan" not in self._cache:
            whole = _given(self.reader, self.reader_references, "schema of avro format")
            self._cache["plan"] = _Plan.of(whole)
        plan: _Plan = self._cache["plan"]
        return plan


@dataclass(frozen=True, slots=True)
class _Plan:
    """Parsed schema and column types of a reader schema."""

    whole: Any
    parsed: Any
    record: bool
    columns: tuple[tuple[str, Kind], ...]

    @classmethod
    def of(cls, whole: Any) -> Self:
        named = definitions(whole)
        parsed = parsed_schema(whole)
        if isinstance(whole, dict) and whole["type"] == "record":
            columns = tuple(
                (member["name"], kind_of(member["type"], named, (whole["name"],)))
                for member in whole["fields"]
            )
            return cls(whole, parsed, True, columns)
        return cls(whole, parsed, False, ((VALUE, kind_of(whole, named, ())),))


def _given(text: str, references: Sequence[tuple[str, Registered]], what: str) -> Any:
    try:
        whole = whole_schema(text, references)
        parsed_schema(whole)
    except InvalidValue as invalid:
        raise UsageError(
            f"{what} cannot be understood: {invalid}", hint="Give an Avro schema as JSON."
        ) from None
    return whole
