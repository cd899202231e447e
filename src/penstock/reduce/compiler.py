"""Compiler from a JSON schema to functions of a value.

A function returns the strategies that its schema applies to the value and to the locations
inside, or None if the value does not match. With a `path`, functions also track the
location and record where they rejected the value.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import UsageError
from penstock.reduce.assertion import ASSERTIONS, Test, count_of, regex
from penstock.reduce.document import Document, kind_of, show_pointer
from penstock.reduce.keywords import CONDITIONAL, check_keywords, subschemas
from penstock.reduce.references import References, has_reduce_annotation
from penstock.reduce.strategy import parse_strategy
from penstock.reduce.strategy_tree import NOTHING, StrategyTree, join

__all__ = ["Compiler", "Failure", "Visit"]

Visit: TypeAlias = Callable[[Document], StrategyTree | None]


@dataclass(frozen=True, slots=True)
class Failure:
    """Location of a mismatch, without the value."""

    location: str
    """JSON pointer in the document."""
    keyword: str
    """Place of the keyword in the schema."""
    found: str
    """JSON type of the value."""


class Compiler:
    """Compiler of one schema; with a `path`, its functions record failures."""

    def __init__(self, references: References, *, path: list[str | int] | None) -> None:
        self._references = references
        self._path = path
        self._compiled: dict[int, list[Visit]] = {}
        self.failures: list[Failure] = []
        self.deletes = False
        self.varies = False

    def visit_of(self, schema: Any, at: str) -> Visit:
        """Return the function of `schema`, whose place is `at`."""
        if schema is True:
            return lambda _value: NOTHING
        if schema is False:
            return self._reporting(lambda _value: None, at)
        if not isinstance(schema, dict):
            raise UsageError(
                f'JSON schema "{at}" is not a schema', hint="Write an object, true or false."
            )
        compiled = self._compiled.get(id(schema))
        if compiled is None:
            compiled = self._compiled[id(schema)] = []
            compiled.append(self._compile(schema, at))
        elif not compiled:
            # A recursive schema: its function does not exist yet.
            return lambda value: compiled[0](value)
        return compiled[0]

    def _compile(self, schema: dict[str, Any], at: str) -> Visit:
        check_keywords(schema, at)
        strategy = (
            parse_strategy(schema["reduce"], at=f"{at}/reduce") if "reduce" in schema else None
        )
        leaf = StrategyTree(strategy) if strategy else NOTHING
        self.deletes |= leaf.deletes
        self.varies |= any(
            has_reduce_annotation(inner, self._references)
            for path, inner in subschemas(schema)
            # A merge by key changes the index of tuple items, and with it their schema.
            if path[0] in CONDITIONAL or (path[0] in ("items", "prefixItems") and len(path) > 1)
        )
        tests = [
            self._reported_test(make(schema[keyword], f"{at}/{keyword}"), f"{at}/{keyword}")
            for keyword, make in ASSERTIONS.items()
            if keyword in schema
        ]
        inside = [*self._objects(schema, at), *self._arrays(schema, at)]
        # The schema with the highest priority is joined last.
        visits = inside + [*self._in_place(schema, at)][::-1]
        if not visits and not tests:
            return lambda _value: leaf
        if not visits and len(tests) == 1:
            (test,) = tests
            return self._keep_failures(lambda value: leaf if test(value) else None)

        def visit(value: Document) -> StrategyTree | None:
            for test in tests:
                if not test(value):
                    return None
            tree = NOTHING
            for visit_inner in visits:
                inner_tree = visit_inner(value)
                if inner_tree is None:
                    return None
                if inner_tree is not NOTHING:
                    tree = join(tree, inner_tree)
            if strategy is None:
                return tree
            return StrategyTree(strategy, tree.inside) if tree.inside else leaf

        return self._keep_failures(visit)

    # Schemas that apply to the same value.

    def _in_place(self, schema: dict[str, Any], at: str) -> Iterator[Visit]:
        if "$ref" in schema:
            target = self._references.target(schema)
            yield self.visit_of(target, self._references.pointer_to(target))
        yield from self._branches(schema, "allOf", at)
        if "anyOf" in schema:
            yield self._reporting(_any_of(self._branches(schema, "anyOf", at)), f"{at}/anyOf")
        if "oneOf" in schema:
            yield self._reporting(_one_of(self._branches(schema, "oneOf", at)), f"{at}/oneOf")
        for name, inner in _named(schema, "dependentSchemas", at):
            yield _dependent(name, self.visit_of(inner, f"{at}/dependentSchemas/{name}"))
        if "if" in schema:
            condition, then, otherwise = (
                self.visit_of(schema.get(keyword, True), f"{at}/{keyword}")
                for keyword in ("if", "then", "else")
            )
            yield _if(self._quiet(condition), then, otherwise)
        if "not" in schema:
            excluded = self._quiet(self.visit_of(schema["not"], f"{at}/not"))
            yield self._reporting(
                lambda value: NOTHING if excluded(value) is None else None, f"{at}/not"
            )

    def _branches(self, schema: dict[str, Any], keyword: str, at: str) -> list[Visit]:
        branches = schema.get(keyword, [])
        if not isinstance(branches, list):
            raise UsageError(
                f'keyword "{at}/{keyword}" is not a list', hint="Write a list of schemas."
            )
        return [self.visit_of(branch, f"{at}/{keyword}/{i}") for i, branch in enumerate(branches)]

    # Schemas that apply to the properties or items of the value.

    def _objects(self, schema: dict[str, Any], at: str) -> Iterator[Visit]:
        if "propertyNames" in schema:
            name_visit = self.visit_of(schema["propertyNames"], f"{at}/propertyNames")
            yield _property_names(name_visit)
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

        def visit(value: Document) -> StrategyTree | None:
            if type(value) is not dict:
                return NOTHING
            inside: dict[str | int, StrategyTree] = {}
            for name, inner in value.items():
                visits = [known[name]] if name in known else []
                visits += [visit_inner for search, visit_inner in patterns if search(name)]
                if not visits and more is not None:
                    visits = [more]
                if path is not None:
                    path.append(name)
                tree = NOTHING
                for visit_inner in reversed(visits):
                    inner_tree = visit_inner(inner)
                    if inner_tree is None:
                        return None
                    tree = join(tree, inner_tree)
                if tree is not NOTHING:
                    inside[name] = tree
                if path is not None:
                    path.pop()
            return StrategyTree(None, inside) if inside else NOTHING

        return visit

    def _arrays(self, schema: dict[str, Any], at: str) -> Iterator[Visit]:
        if "contains" in schema:
            contained = self._quiet(self.visit_of(schema["contains"], f"{at}/contains"))
            least, most = (
                count_of(schema[keyword], f"{at}/{keyword}") if keyword in schema else otherwise
                for keyword, otherwise in (("minContains", 1), ("maxContains", sys.maxsize))
            )
            yield self._reporting(_contains(contained, least, most), f"{at}/contains")
        first_at, rest_at = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            first_at, rest_at = "items", "additionalItems"
        visits = self._branches(schema, first_at, at)
        visit_rest = (
            self.visit_of(schema[rest_at], f"{at}/{rest_at}") if rest_at in schema else None
        )
        path = self._path

        def visit(value: Document) -> StrategyTree | None:
            if type(value) is not list:
                return NOTHING
            inside: dict[str | int, StrategyTree] = {}
            for i, item in enumerate(value):
                visit_item = visits[i] if i < len(visits) else visit_rest
                if visit_item is None:
                    break
                if path is not None:
                    path.append(i)
                tree = visit_item(item)
                if tree is None:
                    return None
                if tree is not NOTHING:
                    inside[i] = tree
                if path is not None:
                    path.pop()
            return StrategyTree(None, inside) if inside else NOTHING

        if visits or visit_rest:
            yield visit

    # Failures. The first remaining failure is the reason: failures inside a schema that matched
    # in the end are dropped.

    def _reported_test(self, test: Test, at: str) -> Test:
        if self._path is None:
            return test

        def report(value: Document) -> bool:
            matches = test(value)
            if not matches:
                self._report(value, at)
            return matches

        return report

    def _reporting(self, visit: Visit, at: str) -> Visit:
        """Attribute a rejection to the keyword at `at`, not to its subschemas."""
        if self._path is None:
            return visit
        quiet = self._quiet(visit)

        def report(value: Document) -> StrategyTree | None:
            tree = quiet(value)
            if tree is None:
                self._report(value, at)
            return tree

        return report

    def _quiet(self, visit: Visit) -> Visit:
        return self._restoring_path(visit, keep=False)

    def _keep_failures(self, visit: Visit) -> Visit:
        return self._restoring_path(visit, keep=True)

    def _restoring_path(self, visit: Visit, *, keep: bool) -> Visit:
        """Wrap `visit` to restore the path and, unless it fails and `keep` is set, the failures."""
        path = self._path
        if path is None:
            return visit

        def restore(value: Document) -> StrategyTree | None:
            depth, before = len(path), len(self.failures)
            tree = visit(value)
            del path[depth:]
            if tree is not None or not keep:
                del self.failures[before:]
            return tree

        return restore

    def _report(self, value: Document, at: str) -> None:
        self.failures.append(Failure(show_pointer(self._path), at, kind_of(value)))


def _named(schema: dict[str, Any], keyword: str, at: str) -> list[tuple[str, Any]]:
    schemas = schema.get(keyword, {})
    if not isinstance(schemas, dict):
        raise UsageError(
            f'keyword "{at}/{keyword}" is not an object', hint="Write an object of schemas."
        )
    return list(schemas.items())


def _any_of(branches: Sequence[Visit]) -> Visit:
    def visit(value: Document) -> StrategyTree | None:
        trees = [tree for branch in branches if (tree := branch(value)) is not None]
        return _join_all(trees) if trees else None

    return visit


def _one_of(branches: Sequence[Visit]) -> Visit:
    def visit(value: Document) -> StrategyTree | None:
        trees = [tree for branch in branches if (tree := branch(value)) is not None]
        return trees[0] if len(trees) == 1 else None

    return visit


def _join_all(all_of: Sequence[StrategyTree]) -> StrategyTree:
    tree = NOTHING
    for branch in reversed(all_of):
        tree = join(tree, branch)
    return tree


def _if(condition: Visit, then: Visit, otherwise: Visit) -> Visit:
    def visit(value: Document) -> StrategyTree | None:
        condition_tree = condition(value)
        if condition_tree is None:
            return otherwise(value)
        tree = then(value)
        return None if tree is None else join(condition_tree, tree)

    return visit


def _dependent(name: str, branch: Visit) -> Visit:
    return lambda value: branch(value) if type(value) is dict and name in value else NOTHING


def _property_names(branch: Visit) -> Visit:
    def visit(value: Document) -> StrategyTree | None:
        matches = type(value) is not dict or all(branch(name) is not None for name in value)
        return NOTHING if matches else None

    return visit


def _contains(item_visit: Visit, least: int, most: int) -> Visit:
    def visit(value: Document) -> StrategyTree | None:
        if type(value) is not list:
            return NOTHING
        inside = {i: tree for i, item in enumerate(value) if (tree := item_visit(item)) is not None}
        if not least <= len(inside) <= most:
            return None
        return StrategyTree(
            None, {i: branch for i, branch in inside.items() if branch is not NOTHING}
        )

    return visit


def _properties(known: dict[str, Visit], more: Visit | None) -> Visit:
    def visit(value: Document) -> StrategyTree | None:
        if type(value) is not dict:
            return NOTHING
        inside: dict[str | int, StrategyTree] = {}
        for name, inner in value.items():
            branch = known.get(name, more)
            if branch is not None:
                tree = branch(inner)
                if tree is None:
                    return None
                if tree is not NOTHING:
                    inside[name] = tree
        return StrategyTree(None, inside) if inside else NOTHING

    return visit
