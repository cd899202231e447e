"""Resolution of `$ref` within one schema.

Nothing is fetched: a schema that refers to another schema contains it under `$defs`, with
its `$id`. Every schema object has a place for error messages: its JSON pointer from the root.
"""

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock.errors import UsageError
from penstock.reduce.document import ABSENT, find, parse_pointer, show_pointer
from penstock.reduce.keywords import DEFINITIONS, subschemas

__all__ = ["References", "has_reduce_annotation"]


def has_reduce_annotation(
    schema: Any, references: "References", seen: frozenset[int] = frozenset()
) -> bool:
    """Return whether `schema`, or a schema that it refers to, has a `reduce` annotation."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    if "reduce" in schema:
        return True
    seen |= {id(schema)}
    inner = [
        inner_schema for path, inner_schema in subschemas(schema) if path[0] not in DEFINITIONS
    ]
    if "$ref" in schema:
        inner.append(references.target(schema))
    return any(has_reduce_annotation(inner_schema, references, seen) for inner_schema in inner)


class References:
    """Index of the schema objects, resources and anchors of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._index(root, base="", at="#")

    def pointer_to(self, schema: Any) -> str:
        """Return the JSON pointer of a schema object, for messages."""
        return self._places.get(id(schema), "#")

    def target(self, schema: dict[str, Any]) -> Any:
        """Return the schema that the `$ref` of `schema` refers to."""
        reference, base = schema["$ref"], self._bases[id(schema)]
        if not isinstance(reference, str):
            raise self._unresolved(schema, "is not a string")
        url, fragment = (
            (base, reference[1:])
            if reference.startswith("#")
            else urldefrag(urljoin(base, reference))
        )
        if url not in self._resources:
            raise self._unresolved(schema, "is not in the schema")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((url, fragment), ABSENT)
        else:
            target = find(self._resources[url], parse_pointer(fragment, what="reference"))
        if not isinstance(target, dict | bool):
            raise self._unresolved(schema, "does not refer to a schema")
        if isinstance(target, dict) and id(target) not in self._bases:
            self._index(target, base=url, at=f"#{fragment}")
        return target

    def _index(self, schema: Any, *, base: str, at: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._bases:
            return
        if isinstance(schema.get("$id"), str):
            base = urldefrag(urljoin(base, schema["$id"])).url
            self._resources.setdefault(base, schema)
        if isinstance(schema.get("$anchor"), str):
            self._anchors[base, schema["$anchor"]] = schema
        self._bases[id(schema)] = base
        self._places[id(schema)] = at
        for path, inner in subschemas(schema):
            self._index(inner, base=base, at=at + show_pointer(path))

    def _unresolved(self, schema: dict[str, Any], why: str) -> UsageError:
        return UsageError(
            f'reference "{self.pointer_to(schema)}/$ref" {why}',
            hint="Add the referenced schema under $defs of the same schema; nothing is fetched.",
        )
