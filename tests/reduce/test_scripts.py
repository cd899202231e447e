"""Stories of documents that are combined and reduced, in tests/scripts/reduce.

schema                   a JSON schema, in YAML, for what follows
strategies               one document; the strategies at its locations
combine                  documents, one to a line; what is left of them
reduce [left=yes]        documents; what they make of nothing, or of the first
columns                  fields, name and pointer; how their columns are aggregated
key                      pointers; whether they can be the key
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import PenstockError
from penstock.reduce import ABSENT, Reducer, check_key, columns_of, decode, encode
from penstock.reduce.annotation import Schema
from penstock.reduce.applied import Applied
from penstock.reduce.document import show_pointer
from tests.datadriven import Directive
from tests.fix_scripts import Script, stories


def shown(applied: Applied, at: tuple[str | int, ...] = ()) -> list[str]:
    own = [] if applied.strategy is None else [f'"{show_pointer(at)}" {applied.strategy}']
    return own + [
        line for name, inner in applied.inside.items() for line in shown(inner, (*at, name))
    ]


class Desk:
    """Whoever obeys the script."""

    schema: Any = True

    def obey(self, directive: Directive) -> str:
        try:
            return "\n".join(getattr(self, f"_{directive.name}")(directive))
        except PenstockError as error:
            notes = [f"{label}: {text}" for label, text in _notes(error) if text]
            return "\n".join([f"{type(error).__name__}: {error}", *notes])

    def _schema(self, directive: Directive) -> list[str]:
        self.schema = yaml.safe_load("\n".join(directive.input))
        Reducer(self.schema, "orders")
        return ["read"]

    def _strategies(self, directive: Directive) -> list[str]:
        (document,) = self._documents(directive)
        applied = Schema(self.schema).visit(document)
        return ["does not match"] if applied is None else shown(applied) or ["none"]

    def _combine(self, directive: Directive) -> list[str]:
        combined = Reducer(self.schema, "orders").combine(self._documents(directive))
        return [encode(document).decode() for document in combined]

    def _reduce(self, directive: Directive) -> list[str]:
        left, documents = ABSENT, self._documents(directive)
        if directive.args.get("left"):
            left, *documents = documents
        keep = directive.args.get("deleted") == "kept"
        done = Reducer(self.schema, "orders").reduce(documents, left=left, keep_deleted=keep)
        return ["deleted: " * done.deleted + encode(done.document).decode()]

    def _columns(self, directive: Directive) -> list[str]:
        fields = dict(line.replace('""', "").split(" ") for line in directive.input)
        return [f"{name} {column}" for name, column in columns_of(self.schema, fields).items()]

    def _key(self, directive: Directive) -> list[str]:
        check_key(self.schema, directive.input, collection="orders")
        return ["a key"]

    def _documents(self, directive: Directive) -> list[Any]:
        return [decode(line, what="line") for line in directive.input]


def _notes(error: PenstockError) -> list[tuple[str, str]]:
    return [("detail", error.detail), ("hint", error.hint)]


@pytest.mark.parametrize("path", stories("reduce"), ids=lambda path: path.stem)
def test_script(path: Path, script: Script):
    script(path, Desk().obey)
