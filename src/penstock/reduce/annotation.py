"""Strategies of a JSON schema for one document.

The strategy of a location can depend on the document (`if`, `oneOf`). Validation therefore
returns either a mismatch or the strategies at the locations of the document. A schema is
compiled once into functions of a value: libraries that collect annotations allocate an
object per keyword and location, which costs many times the reduction itself.

Several schemas can apply to one location. The annotation next to a `$ref` or an `allOf` has
priority over the annotations inside them, and among those the first has priority. For
nested locations the order is reversed: inside has priority. This is the order of Flow.

The drafts 2019-09 and 2020-12 are supported. `format` and the content keywords assert
nothing, as both drafts define. Unsupported keywords are rejected when the schema is compiled.
"""

from typing import Any, Final

from penstock.errors import UsageError
from penstock.reduce.compiler import Compiler, Failure, Visit
from penstock.reduce.document import Document
from penstock.reduce.references import References

__all__ = ["Schema"]

_DRAFTS: Final = (
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)


class Schema:
    """A compiled JSON schema.

    Args:
        root: The schema, as parsed from JSON or YAML.

    Raises:
        UsageError: The schema is invalid or uses an unsupported keyword.
    """

    def __init__(self, root: Any) -> None:
        self.root: Final = root
        self.references: Final = References(root)
        draft = root.get("$schema") if isinstance(root, dict) else None
        if draft is not None and str(draft).removesuffix("#") not in _DRAFTS:
            raise UsageError(
                f'JSON schema draft "{draft}" is not supported',
                hint=f"Rewrite the schema for {_DRAFTS[1]} and name that draft in $schema.",
            )
        compiler = Compiler(self.references, path=None)
        self.visit: Final = compiler.visit_of(root, "#")
        """Return the strategies of a document, or None if the document does not match."""
        self.deletes: Final = compiler.deletes
        """True if an annotation deletes."""
        self.varies: Final = compiler.varies
        """True if the strategy of a location can differ between documents."""
        self._explainer: tuple[Compiler, Visit] | None = None

    def explain(self, document: Document) -> Failure:
        """Return the first mismatch of a document that `visit` rejected."""
        if self._explainer is None:
            compiler = Compiler(self.references, path=[])
            self._explainer = compiler, compiler.visit_of(self.root, "#")
        compiler, visit = self._explainer
        compiler.failures.clear()
        visit(document)
        return compiler.failures[0]
