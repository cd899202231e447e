"""What `$ref` refers to, within one schema.

Nothing is fetched: a schema that refers to another carries it under `$defs`, with its
`$id`. Every schema object gets a place, its JSON pointer from the root, so that an error
can name it.
"""

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock.errors import UsageError
from penstock.reduce.document import ABSENT, find, parse_pointer, show_pointer
from penstock.reduce.keywords import DEFINITIONS, subschemas

__all__ = ["References", "carries"]


def carries(schema: Any, references: "References", seen: frozenset[int] = frozenset()) -> bool:
    """Whether `schema`, or what it refers to, has a `reduce` annotation anywhere."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    if "reduce" in schema:
        return True
    seen |= {id(schema)}
    inner = [each for way, each in subschemas(schema) if way[0] not in DEFINITIONS]
    if "$ref" in schema:
        inner.append(references.target(schema))
    return any(carries(each, references, seen) for each in inner)


class References:
    """Where everything is in one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._enter(root, base="", at="#")

    def place_of(self, schema: Any) -> str:
        """The JSON pointer of a schema object, for people."""
        return self._places.get(id(schema), "#")

    def target(self, schema: dict[str, Any]) -> Any:
        """The schema that the `$ref` of `schema` refers to."""
        reference, base = schema["$ref"], self._bases[id(schema)]
        if not isinstance(reference, str):
            raise self._unknown(schema, "is no text")
        url, fragment = (
            (base, reference[1:])
            if reference.startswith("#")
            else urldefrag(urljoin(base, reference))
        )
        if url not in self._resources:
            raise self._unknown(schema, "is not in the schema")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((url, fragment), ABSENT)
        else:
            found = find(self._resources[url], parse_pointer(fragment, what="reference"))
        if not isinstance(found, dict | bool):
            raise self._unknown(schema, "leads to no schema")
        if isinstance(found, dict) and id(found) not in self._bases:
            self._enter(found, base=url, at=f"#{fragment}")
        return found

    def _enter(self, schema: Any, *, base: str, at: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._bases:
            return
        if isinstance(schema.get("$id"), str):
            base = urldefrag(urljoin(base, schema["$id"])).url
            self._resources.setdefault(base, schema)
        if isinstance(schema.get("$anchor"), str):
            self._anchors[base, schema["$anchor"]] = schema
        self._bases[id(schema)] = base
        self._places[id(schema)] = at
        for way, inner in subschemas(schema):
            self._enter(inner, base=base, at=at + show_pointer(way))

    def _unknown(self, schema: dict[str, Any], why: str) -> UsageError:
        return UsageError(
            f'reference "{self.place_of(schema)}/$ref" {why}',
            hint="Put what it refers to under $defs of the same schema; nothing is fetched.",
        )
