"""From a JSON schema to functions of a value.

A function that is asked about a value answers with the strategies that its schema applies
there and further inside, or with None if the value does not match. Those made for
explaining also keep the path to where they are, and write down where they said no.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import UsageError
from penstock.reduce.applied import NOTHING, Applied, join
from penstock.reduce.assertion import ASSERTIONS, Test, count_of, regex
from penstock.reduce.document import Document, kind_of, show_pointer
from penstock.reduce.keywords import CONDITIONAL, check_keywords, subschemas
from penstock.reduce.references import References, carries
from penstock.reduce.strategy import parse_strategy

__all__ = ["Compiler", "Failure", "Visit"]

Visit: TypeAlias = Callable[[Document], Applied | None]


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a document does not match; nothing of what it holds."""

    location: str
    """In the document."""
    keyword: str
    """In the schema."""
    found: str
    """The type of what is there."""


class Compiler:
    """Makes the functions of one schema; given a `path`, those that explain."""

    def __init__(self, references: References, *, path: list[str | int] | None) -> None:
        self._references = references
        self._path = path
        self._made: dict[int, list[Visit]] = {}
        self.failures: list[Failure] = []
        self.deletes = False
        self.varies = False

    def visit_of(self, schema: Any, at: str) -> Visit:
        """The function of `schema`, which stands at `at`."""
        if schema is True:
            return lambda _value: NOTHING
        if schema is False:
            return self._told(lambda _value: None, at)
        if not isinstance(schema, dict):
            raise UsageError(
                f'JSON schema "{at}" is no schema', hint="Write an object, true or false."
            )
        made = self._made.get(id(schema))
        if made is None:
            made = self._made[id(schema)] = []
            made.append(self._made_of(schema, at))
        elif not made:
            # Met inside itself, before it is made.
            return lambda value: made[0](value)
        return made[0]

    def _made_of(self, schema: dict[str, Any], at: str) -> Visit:
        check_keywords(schema, at)
        own = parse_strategy(schema["reduce"], at=f"{at}/reduce") if "reduce" in schema else None
        leaf = Applied(own) if own else NOTHING
        self.deletes |= leaf.deletes
        self.varies |= any(
            carries(inner, self._references)
            for way, inner in subschemas(schema)
            # A place in a tuple is another one after a merge by key.
            if way[0] in CONDITIONAL or (way[0] in ("items", "prefixItems") and len(way) > 1)
        )
        tests = [
            self._told_test(make(schema[keyword], f"{at}/{keyword}"), f"{at}/{keyword}")
            for keyword, make in ASSERTIONS.items()
            if keyword in schema
        ]
        inside = [*self._objects(schema, at), *self._arrays(schema, at)]
        # What goes before the rest is joined last.
        visits = inside + [*self._in_place(schema, at)][::-1]
        if not visits and not tests:
            return lambda _value: leaf
        if not visits and len(tests) == 1:
            (test,) = tests
            return self._settled(lambda value: leaf if test(value) else None)

        def visit(value: Document) -> Applied | None:
            for test in tests:
                if not test(value):
                    return None
            found = NOTHING
            for each in visits:
                more = each(value)
                if more is None:
                    return None
                if more is not NOTHING:
                    found = join(found, more)
            if own is None:
                return found
            return Applied(own, found.inside) if found.inside else leaf

        return self._settled(visit)

    # On behalf of the same value.

    def _in_place(self, schema: dict[str, Any], at: str) -> Iterator[Visit]:
        if "$ref" in schema:
            target = self._references.target(schema)
            yield self.visit_of(target, self._references.place_of(target))
        yield from self._branches(schema, "allOf", at)
        if "anyOf" in schema:
            yield self._told(_any_of(self._branches(schema, "anyOf", at)), f"{at}/anyOf")
        if "oneOf" in schema:
            yield self._told(_one_of(self._branches(schema, "oneOf", at)), f"{at}/oneOf")
        for name, inner in _named(schema, "dependentSchemas", at):
            yield _dependent(name, self.visit_of(inner, f"{at}/dependentSchemas/{name}"))
        if "if" in schema:
            condition, then, otherwise = (
                self.visit_of(schema.get(keyword, True), f"{at}/{keyword}")
                for keyword in ("if", "then", "else")
            )
            yield _if(self._quiet(condition), then, otherwise)
        if "not" in schema:
            refused = self._quiet(self.visit_of(schema["not"], f"{at}/not"))
            yield self._told(lambda value: NOTHING if refused(value) is None else None, f"{at}/not")

    def _branches(self, schema: dict[str, Any], keyword: str, at: str) -> list[Visit]:
        branches = schema.get(keyword, [])
        if not isinstance(branches, list):
            raise UsageError(f'keyword "{at}/{keyword}" is no list', hint="Give it schemas.")
        return [self.visit_of(each, f"{at}/{keyword}/{i}") for i, each in enumerate(branches)]

    # On behalf of what is in an object or an array.

    def _objects(self, schema: dict[str, Any], at: str) -> Iterator[Visit]:
        if "propertyNames" in schema:
            name_visit = self.visit_of(schema["propertyNames"], f"{at}/propertyNames")
            yield _each_name(name_visit)
        known = {
            name: self.visit_of(inner, f"{at}/properties/{name}")
            for name, inner in _named(schema, "properties", at)
        }
        patterns = [
            (
                regex(name, f"{at}/patternProperties/{name}").search,
                self.visit_of(inner, f"{at}/patternProperties/{name}"),
            )
            for name, inner in _named(schema, "patternProperties", at)
        ]
        more = None
        if "additionalProperties" in schema:
            more = self.visit_of(schema["additionalProperties"], f"{at}/additionalProperties")
        if not patterns and self._path is None and (known or more):
            yield _properties(known, more)
        elif known or patterns or more:
            yield self._all_properties(known, patterns, more)

    def _all_properties(
        self,
        known: dict[str, Visit],
        patterns: Sequence[tuple[Callable[[str], Any], Visit]],
        more: Visit | None,
    ) -> Visit:
        path = self._path

        def visit(value: Document) -> Applied | None:
            if type(value) is not dict:
                return NOTHING
            inside: dict[str | int, Applied] = {}
            for name, inner in value.items():
                visits = [known[name]] if name in known else []
                visits += [each for search, each in patterns if search(name)]
                if not visits and more is not None:
                    visits = [more]
                if path is not None:
                    path.append(name)
                found = NOTHING
                for each in reversed(visits):
                    this = each(inner)
                    if this is None:
                        return None
                    found = join(found, this)
                if found is not NOTHING:
                    inside[name] = found
                if path is not None:
                    path.pop()
            return Applied(None, inside) if inside else NOTHING

        return visit

    def _arrays(self, schema: dict[str, Any], at: str) -> Iterator[Visit]:
        if "contains" in schema:
            wanted = self._quiet(self.visit_of(schema["contains"], f"{at}/contains"))
            least, most = (
                count_of(schema[keyword], f"{at}/{keyword}") if keyword in schema else otherwise
                for keyword, otherwise in (("minContains", 1), ("maxContains", sys.maxsize))
            )
            yield self._told(_contains(wanted, least, most), f"{at}/contains")
        first_at, rest_at = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            first_at, rest_at = "items", "additionalItems"
        visits = self._branches(schema, first_at, at)
        rest = self.visit_of(schema[rest_at], f"{at}/{rest_at}") if rest_at in schema else None
        path = self._path

        def visit(value: Document) -> Applied | None:
            if type(value) is not list:
                return NOTHING
            inside: dict[str | int, Applied] = {}
            for i, item in enumerate(value):
                each = visits[i] if i < len(visits) else rest
                if each is None:
                    break
                if path is not None:
                    path.append(i)
                found = each(item)
                if found is None:
                    return None
                if found is not NOTHING:
                    inside[i] = found
                if path is not None:
                    path.pop()
            return Applied(None, inside) if inside else NOTHING

        if visits or rest:
            yield visit

    # Explaining. The first failure that is left is the reason: what a schema that matched
    # in the end had against the value on its way is taken back.

    def _told_test(self, test: Test, at: str) -> Test:
        if self._path is None:
            return test

        def told(value: Document) -> bool:
            matches = test(value)
            if not matches:
                self._tell(value, at)
            return matches

        return told

    def _told(self, visit: Visit, at: str) -> Visit:
        """A refusal is that of the keyword at `at`, whatever came of its parts."""
        if self._path is None:
            return visit
        quiet = self._quiet(visit)

        def told(value: Document) -> Applied | None:
            found = quiet(value)
            if found is None:
                self._tell(value, at)
            return found

        return told

    def _quiet(self, visit: Visit) -> Visit:
        return self._kept(visit, keep=False)

    def _settled(self, visit: Visit) -> Visit:
        return self._kept(visit, keep=True)

    def _kept(self, visit: Visit, *, keep: bool) -> Visit:
        """`visit`, which leaves the path as it was, and failures only if it fails and may."""
        path = self._path
        if path is None:
            return visit

        def kept(value: Document) -> Applied | None:
            depth, before = len(path), len(self.failures)
            found = visit(value)
            del path[depth:]
            if found is not None or not keep:
                del self.failures[before:]
            return found

        return kept

    def _tell(self, value: Document, at: str) -> None:
        self.failures.append(Failure(show_pointer(self._path), at, kind_of(value)))


def _named(schema: dict[str, Any], keyword: str, at: str) -> list[tuple[str, Any]]:
    schemas = schema.get(keyword, {})
    if not isinstance(schemas, dict):
        raise UsageError(f'keyword "{at}/{keyword}" is no object', hint="Give it named schemas.")
    return list(schemas.items())


def _any_of(branches: Sequence[Visit]) -> Visit:
    def visit(value: Document) -> Applied | None:
        matching = [found for each in branches if (found := each(value)) is not None]
        return _joined(matching) if matching else None

    return visit


def _one_of(branches: Sequence[Visit]) -> Visit:
    def visit(value: Document) -> Applied | None:
        matching = [found for each in branches if (found := each(value)) is not None]
        return matching[0] if len(matching) == 1 else None

    return visit


def _joined(all_of: Sequence[Applied]) -> Applied:
    found = NOTHING
    for each in reversed(all_of):
        found = join(found, each)
    return found


def _if(condition: Visit, then: Visit, otherwise: Visit) -> Visit:
    def visit(value: Document) -> Applied | None:
        met = condition(value)
        if met is None:
            return otherwise(value)
        found = then(value)
        return None if found is None else join(met, found)

    return visit


def _dependent(name: str, each: Visit) -> Visit:
    return lambda value: each(value) if type(value) is dict and name in value else NOTHING


def _each_name(each: Visit) -> Visit:
    def visit(value: Document) -> Applied | None:
        matches = type(value) is not dict or all(each(name) is not None for name in value)
        return NOTHING if matches else None

    return visit


def _contains(wanted: Visit, least: int, most: int) -> Visit:
    def visit(value: Document) -> Applied | None:
        if type(value) is not list:
            return NOTHING
        inside = {i: found for i, item in enumerate(value) if (found := wanted(item)) is not None}
        if not least <= len(inside) <= most:
            return None
        return Applied(None, {i: each for i, each in inside.items() if each is not NOTHING})

    return visit


def _properties(known: dict[str, Visit], more: Visit | None) -> Visit:
    def visit(value: Document) -> Applied | None:
        if type(value) is not dict:
            return NOTHING
        inside: dict[str | int, Applied] = {}
        for name, inner in value.items():
            each = known.get(name, more)
            if each is not None:
                found = each(inner)
                if found is None:
                    return None
                if found is not NOTHING:
                    inside[name] = found
        return Applied(None, inside) if inside else NOTHING

    return visit
