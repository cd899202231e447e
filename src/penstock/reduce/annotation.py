"""Strategies read from a JSON schema, as they apply to one document.

Which strategy a location has may depend on the document: an `if`, a `oneOf`. So it is
found by validating the document, and what comes of it is either that the document does
not match, or the strategies at its locations. A schema is compiled once, into functions
of a value; the libraries that collect annotations make an object of every keyword at
every location, at many times the cost of the reduction itself.

Several schemas can apply at one location. There the annotation beside a `$ref` or an
`allOf` goes before those inside it, and of several inside the first goes before the
rest; for what is further down, inside goes before beside. That is Flow's order.

Read are the drafts 2019-09 and 2020-12. `format` and the content keywords assert
nothing, as both have it. What we cannot follow is refused when the schema is read.
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
    """A JSON schema, compiled.

    Args:
        root: as JSON or YAML has it.

    Raises:
        UsageError: it is none, or has what we cannot follow; says where.
    """

    def __init__(self, root: Any) -> None:
        self.root: Final = root
        self.references: Final = References(root)
        draft = root.get("$schema") if isinstance(root, dict) else None
        if draft is not None and str(draft).removesuffix("#") not in _DRAFTS:
            raise UsageError(
                f'JSON schema is of the draft "{draft}"',
                hint=f"Rewrite it for {_DRAFTS[1]}, and say so.",
            )
        compiler = Compiler(self.references, path=None)
        self.visit: Final = compiler.visit_of(root, "#")
        """From a document to the strategies in it; None if it does not match."""
        self.deletes: Final = compiler.deletes
        """Whether some annotation deletes."""
        self.varies: Final = compiler.varies
        """Whether one location can have one strategy in one document and another in the next."""
        self._explainer: tuple[Compiler, Visit] | None = None

    def explain(self, document: Document) -> Failure:
        """Why `document`, for which `visit` says None, does not match."""
        if self._explainer is None:
            compiler = Compiler(self.references, path=[])
            self._explainer = compiler, compiler.visit_of(self.root, "#")
        compiler, visit = self._explainer
        compiler.failures.clear()
        visit(document)
        return compiler.failures[0]
