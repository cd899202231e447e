"""Checks of codecs and schemas when a collection is created, opened or altered.

The requested codecs or schema are compared with the stored ones before a handle is
returned, so no caller reads or writes with the wrong codec.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from penstock.data import Codec, check_row_schema, evolve
from penstock.data.codec import BUILT_IN
from penstock.data.collection_name import has_controls
from penstock.data.schema import default_row
from penstock.errors import UsageError
from penstock.persist.input_validation import render_columns
from penstock.persist.state import CollectionState, SchemaVersion, columns_of, is_hidden

__all__ = ["accept", "check_name", "codec_of", "grown", "schema_version"]

MAX_NAME: Final = 1_000
"""Maximum length in characters: a schema and a table of 63 bytes each, every byte escaped."""


def accept(collection: CollectionState, requested: SchemaVersion, *, where: str) -> None:
    """Check that a collection can be opened with the requested codecs or schema.

    Raises:
        UsageError: the collection has other codecs or another schema.
    """
    stored = collection.schemas[-1]
    what = f'collection "{collection.name}" of location "{where}"'
    if bool(stored.codecs) != bool(requested.codecs):
        holds = "keys and values" if stored.codecs else "rows"
        raise UsageError(f"{what} holds {holds}", hint=f"Open it for {holds}.")
    for role, (stored_codec, stored_version), (requested_codec, requested_version) in zip(
        ("key", "value"), stored.codecs, requested.codecs, strict=False
    ):
        if stored_codec != requested_codec:
            raise UsageError(
                f'{what} has codec "{stored_codec}" for its {role}, not "{requested_codec}"',
                hint=f'Open it with the codec "{stored_codec}".',
            )
        if columns_of(stored).field(role).type != columns_of(requested).field(role).type:
            raise UsageError(
                f'{what} stores its {role} of codec "{stored_codec}" in another type',
                detail=f"The stored type is {columns_of(stored).field(role).type}; the given codec "
                f"has {columns_of(requested).field(role).type}.",
                hint="Open it with the codec of its creation.",
            )
        if requested_version < stored_version:
            raise UsageError(
                f'{what} was written with version {stored_version} of codec "{stored_codec}"',
                detail=f"The given codec has version {requested_version}.",
                hint="Open it with that version or a newer one.",
            )
    if not stored.codecs and (
        not columns_of(stored).equals(columns_of(requested)) or stored.key != requested.key
    ):
        raise UsageError(
            f"{what} has another schema",
            detail=f"It has {_describe(stored)}; the requested schema is {_describe(requested)}.",
            hint="Open it with its own schema, then evolve it with alter.",
        )


def codec_of(given: Codec | str | None) -> Codec | None:
    """Return the codec itself, or the built-in codec with the given name."""
    if not isinstance(given, str):
        return given
    if given not in BUILT_IN:
        raise UsageError(
            f'codec "{given}" does not exist',
            hint=f"Name one of {', '.join(BUILT_IN)}, or give a UserCodec.",
        )
    return BUILT_IN[given]


def check_name(name: str, owner: str) -> None:
    """Check that a collection may have this name.

    Raises:
        UsageError: the name is invalid, or reserved for collections with an owner.
    """
    if not name or has_controls(name) or len(name) > MAX_NAME:
        raise UsageError(
            f"collection name {name!r} cannot be used",
            hint=f"Use 1 to {MAX_NAME} characters, and no control characters.",
        )
    if is_hidden(name) and not owner:
        raise UsageError(
            f'collection name "{name}" cannot be used',
            detail="Names with a slash belong to hidden collections, which have an owner.",
            hint="Use a name without a slash.",
        )


def schema_version(
    name: str,
    key: Codec | None,
    value: Codec | None,
    schema: pa.Schema | None,
    key_columns: Sequence[str],
) -> SchemaVersion:
    """Return the first schema version of a new collection of keys and values, or of rows."""
    if (key is None) != (value is None) or (key is None) == (schema is None):
        raise UsageError(
            f'collection "{name}" needs either codecs or a schema',
            hint="Give key=… and value=…, or schema=… with key_columns=….",
        )
    if schema is not None:
        checked = check_row_schema(schema, key_columns, collection=name)
        return SchemaVersion(0, 0, checked.serialize().to_pybytes(), key=tuple(key_columns))
    assert key is not None
    assert value is not None
    columns = pa.schema([("key", key.stored_as), ("value", value.stored_as)])
    codecs = ((key.name, key.version), (value.name, value.version))
    return SchemaVersion(0, 0, columns.serialize().to_pybytes(), key=("key",), codecs=codecs)


def grown(
    collection: CollectionState, schema: pa.Schema, defaults: Mapping[str, Any]
) -> SchemaVersion | None:
    """Return the version that gives a collection `schema` from its upper on; None if unchanged.

    Raises:
        UsageError: existing rows would not have exactly one interpretation in it.
    """
    name, newest = collection.name, collection.schemas[-1]
    if not isinstance(schema, pa.Schema):
        raise UsageError(
            f'schema for collection "{name}" is a {type(schema).__name__}',
            hint="Give a pyarrow schema.",
        )
    try:
        given = _stream_of(default_row(schema, defaults)) if defaults else b""
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f'a default does not fit its column of collection "{name}"', detail=str(error)
        ) from error
    if newest.codecs:
        raise UsageError(
            f'collection "{name}" holds keys and values',
            hint="Its codecs have versions; only the schema of rows can be altered.",
        )
    requested = check_row_schema(schema, newest.key, collection=name)
    if requested.equals(columns_of(newest), check_metadata=True):
        return None
    evolve(columns_of(newest), requested, defaults, collection=name)
    return SchemaVersion(
        version=newest.version + 1,
        since=collection.upper,
        columns=requested.serialize().to_pybytes(),
        key=newest.key,
        defaults=given,
    )


def _stream_of(row: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as stream:
        stream.write_batch(row)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _describe(schema: SchemaVersion) -> str:
    return f"{render_columns(columns_of(schema))} with key {', '.join(schema.key) or 'none'}"
