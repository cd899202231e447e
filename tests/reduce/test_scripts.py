"""Scripts of documents that are combined and reduced, in tests/scripts/reduce.

schema                   a JSON schema, in YAML, for the directives that follow
strategies               one document; the strategies at its locations
combine                  documents, one per line; the combined documents
reduce [left=yes]        documents; the reduced document, from nothing or from the first
columns                  fields, name and pointer; the aggregation of their columns
key                      pointers; whether they can be a key
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import PenstockError
from penstock.reduce import ABSENT, Reducer, check_key, columns_of, decode, encode
from penstock.reduce.annotation import Schema
from penstock.reduce.document import show_pointer
from penstock.reduce.strategy_tree import StrategyTree
from tests.datadriven import Directive
from tests.fix_scripts import Script, stories


def render_strategies(tree: StrategyTree, path: tuple[str | int, ...] = ()) -> list[str]:
    own = [] if tree.strategy is None else [f'"{show_pointer(path)}" {tree.strategy}']
    return own + [
        line
        for name, inner in tree.inside.items()
        for line in render_strategies(inner, (*path, name))
    ]


class ScriptRunner:
    """Runs the directives of a script."""

    schema: Any = True

    def run(self, directive: Directive) -> str:
        try:
            return "\n".join(getattr(self, f"_{directive.name}")(directive))
        except PenstockError as error:
            fields = [f"{label}: {text}" for label, text in _error_fields(error) if text]
            return "\n".join([f"{type(error).__name__}: {error}", *fields])

    def _schema(self, directive: Directive) -> list[str]:
        self.schema = yaml.safe_load("\n".join(directive.input))
        Reducer(self.schema, "orders")
        return ["read"]

    def _strategies(self, directive: Directive) -> list[str]:
        (document,) = self._documents(directive)
        tree = Schema(self.schema).visit(document)
        return ["does not match"] if tree is None else render_strategies(tree) or ["none"]

    def _combine(self, directive: Directive) -> list[str]:
        combined = Reducer(self.schema, "orders").combine(self._documents(directive))
        return [encode(document).decode() for document in combined]

    def _reduce(self, directive: Directive) -> list[str]:
        left, documents = ABSENT, self._documents(directive)
        if directive.args.get("left"):
            left, *documents = documents
        keep = directive.args.get("deleted") == "kept"
        reduced = Reducer(self.schema, "orders").reduce(documents, left=left, keep_deleted=keep)
        return ["deleted: " * reduced.deleted + encode(reduced.document).decode()]

    def _columns(self, directive: Directive) -> list[str]:
        fields = dict(line.replace('""', "").split(" ") for line in directive.input)
        return [f"{name} {column}" for name, column in columns_of(self.schema, fields).items()]

    def _key(self, directive: Directive) -> list[str]:
        check_key(self.schema, directive.input, collection="orders")
        return ["a key"]

    def _documents(self, directive: Directive) -> list[Any]:
        return [decode(line, what="line") for line in directive.input]


def _error_fields(error: PenstockError) -> list[tuple[str, str]]:
    return [("detail", error.detail), ("hint", error.hint)]


@pytest.mark.parametrize("path", stories("reduce"), ids=lambda path: path.stem)
def test_script(path: Path, script: Script):
    script(path, ScriptRunner().run)
