"""Collections that the checks materialize, and the encoding of their documents."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from penstock.data.packed import pack_row
from penstock.protocol.messages import ValidatedBinding
from penstock.protocol.specs import (
    DOCUMENT,
    CollectionSpec,
    ConstraintType,
    FieldSelection,
)
from penstock.testing import specs

__all__ = ["PLAIN", "Document", "Layout", "document", "render", "same_json"]

Document = Mapping[str, Any]

_SELECTABLE: Final = frozenset(
    {
        ConstraintType.FIELD_REQUIRED,
        ConstraintType.LOCATION_REQUIRED,
        ConstraintType.LOCATION_RECOMMENDED,
        ConstraintType.FIELD_OPTIONAL,
    }
)


@dataclass(frozen=True)
class Layout:
    """Fields of documents; each is at the top level, under its own name."""

    keys: tuple[str, ...]
    fields: Mapping[str, str]
    """JSON type of each field; non-key fields may be null or missing."""

    def collection(self, name: str) -> CollectionSpec:
        """Return a collection of such documents."""
        return specs.collection(
            f"conformance/{name}",
            *(
                specs.projection(field, kind, must=True)
                if field in self.keys
                else specs.projection(field, "null", kind)
                for field, kind in sorted(self.fields.items())
            ),
            key=[f"/{key}" for key in self.keys],
            schema=self.schema,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the documents."""
        return {
            "type": "object",
            "properties": {
                name: {"type": kind if name in self.keys else [kind, "null"]}
                for name, kind in self.fields.items()
            },
            "required": list(self.keys),
        }

    def selection(self, validated: ValidatedBinding) -> FieldSelection:
        """Return a selection of all fields that the connector accepts."""
        selectable = {
            name
            for name, constraint in validated.constraints.items()
            if constraint.type in _SELECTABLE
        }
        selected = selectable & {*self.fields, DOCUMENT}
        return FieldSelection(
            keys=self.keys,
            values=tuple(sorted(selected - {*self.keys, DOCUMENT})),
            document=DOCUMENT if DOCUMENT in selected else "",
        )

    def key(self, doc: Document) -> str:
        """Return the key of a document, for comparisons."""
        return json.dumps([doc.get(name) for name in self.keys])

    def packed_key(self, doc: Document) -> bytes:
        """Return the key in its wire encoding."""
        return pack_row([doc[name] for name in self.keys])

    def packed_keys(self, docs: Sequence[Document]) -> pa.BinaryArray:
        """Return the keys of these documents in their wire encoding."""
        return pa.array([self.packed_key(doc) for doc in docs], pa.binary())

    def packed_values(self, docs: Sequence[Document], fields: Sequence[str]) -> pa.BinaryArray:
        """Return these fields of the documents in their wire encoding."""
        return pa.array([pack_row([doc.get(name) for name in fields]) for doc in docs], pa.binary())


PLAIN: Final = Layout(("id",), {"id": "string", "n": "integer", "word": "string"})
"""Layout of most checks: a name, a number and a word."""


def document(name: str, word: str, n: int = 0) -> Document:
    """Return a document of the layout `PLAIN`."""
    return {"id": name, "n": n, "word": word}


def encoded(docs: Sequence[Document]) -> pa.BinaryArray:
    """Return documents in their wire encoding."""
    return pa.array(
        [json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode() for doc in docs],
        pa.binary(),
    )


def same_json(left: Any, right: Any) -> bool:
    """Return whether both are equal JSON values; 1 equals 1.0, but not true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    match left, right:
        case dict(), dict():
            return left.keys() == right.keys() and all(
                same_json(value, right[name]) for name, value in left.items()
            )
        case list(), list():
            return len(left) == len(right) and all(map(same_json, left, right))
        case _:
            return bool(left == right)


def render(value: Any, hide: Callable[[str], str]) -> str:
    """Return a value for a message, without secrets and at most one line long."""
    text = hide(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 160 else f"{text[:120]}… ({len(text)} characters)"
