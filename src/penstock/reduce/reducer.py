"""Documents of one key, folded in source order.

*Combining* is partial: what the documents before them were is not known, so tombstones
stay, and two that cannot become one without knowing stay two. *Reducing* is full: it
begins with the document that is stored, or with nothing. Where the documents were cut
into batches does not show:

    reduce(left, a, b, c) = reduce(left, combine(a, b, c)) = reduce(reduce(left, a), b, c)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import DefiniteError
from penstock.reduce.annotation import Schema
from penstock.reduce.applied import Applied
from penstock.reduce.apply import Apart, Mismatch, applied_to
from penstock.reduce.document import ABSENT, Absent, Document, kind_of, show_pointer
from penstock.reduce.faithful import is_faithful
from penstock.reduce.number import MOST_DIGITS, TooLong

__all__ = ["Reduced", "Reducer"]

_FEW: Final = 32


@dataclass(frozen=True, slots=True)
class Reduced:
    """What has come of a key."""

    document: Document | Absent
    deleted: bool = False
    """The document is the tombstone; whether it is stored, where it was found, is not ours."""


class Reducer:
    """Folds the documents of a collection, as its schema says.

    Args:
        schema: a JSON schema with `reduce` annotations, as JSON or YAML has it.
        collection: whose documents they are, for errors.

    Raises:
        UsageError: the schema has what we cannot follow; says where.
    """

    def __init__(self, schema: Any, collection: str) -> None:
        self._given = schema, collection
        self.what = f'document of collection "{collection}"'
        """What is folded, for errors."""
        self._schema = Schema(schema)
        self._minds = self._schema.deletes or self._schema.varies

    @property
    def schema(self) -> Any:
        """As it was given."""
        return self._given[0]

    def __reduce__(self) -> tuple[Callable[..., "Reducer"], tuple[Any, str]]:
        # Functions do not travel, so whoever gets it compiles it again.
        return Reducer, self._given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reducer) and self._given == other._given

    def __hash__(self) -> int:
        return hash(self.what)

    def check(self, document: Document) -> None:
        """Raises DefiniteError if `document` does not match the schema."""
        self._applied(document)

    def combine(self, documents: Iterable[Document]) -> list[Document]:
        """The changes that `documents` are, in as few documents as say the same.

        Raises:
            DefiniteError: one does not match the schema, or goes with no other.
        """
        documents = list(documents)
        # A few at a time: one by one into what grows, every step would copy all of it.
        while len(documents) > 2 * _FEW:
            parts = (documents[at : at + _FEW] for at in range(0, len(documents), _FEW))
            fewer = [document for part in parts for document in self._combined(part)]
            stuck = 2 * len(fewer) > len(documents)
            documents = fewer
            if stuck:
                break
        return self._combined(documents)

    def _combined(self, documents: Sequence[Document]) -> list[Document]:
        kept: list[tuple[Document, Applied, bool]] = []
        for right in documents:
            applied = self._applied(right)
            both = self._both(*kept[-1][:2], right, applied) if kept else None
            if both is None:
                kept.append((right, applied, False))
            else:
                kept[-1] = both
        for document, _, made in kept:
            if made and not self._minds:
                self._applied(document)
        return [document for document, _, _ in kept]

    def _both(
        self, left: Document, marks: Applied, right: Document, applied: Applied
    ) -> tuple[Document, Applied, bool] | None:
        """The two as one, its strategies, and whether it is a new one; None if they stay apart."""
        try:
            both = self._apply(
                applied, left, right, full=False, marks=marks if self._minds else None
            )
        except Apart:
            return None
        made = both is not left and both is not right
        if not self._minds:
            return both, applied, made
        now = self._applied(both)
        return (both, now, made) if is_faithful(now, applied, marks, left, right, both) else None

    def reduce(
        self,
        documents: Iterable[Document],
        *,
        left: Document | Absent = ABSENT,
        keep_deleted: bool = False,
    ) -> Reduced:
        """What `documents` make of the stored one, if there is one.

        Args:
            documents: in source order.
            left: what is stored.
            keep_deleted: a deletion is only a mark, so what comes after it is reduced into
                the document that was marked; otherwise it begins anew.

        Raises:
            DefiniteError: one does not match the schema, or cannot be reduced.
        """
        documents = list(documents)
        if len(documents) > 2 * _FEW:
            documents = self.combine(documents)
        done = Reduced(left)
        made = False
        for right in documents:
            applied = self._applied(right)
            before = ABSENT if done.deleted and not keep_deleted else done.document
            after = self._apply(applied, before, right, full=True, marks=None)
            done = Reduced(after, applied.deletes)
            made = after is not right
        if made and not done.deleted:
            self._applied(done.document)
        return done

    def _applied(self, document: Document) -> Applied:
        try:
            applied = self._schema.visit(document)
            if applied is not None:
                return applied
            failure = self._schema.explain(document)
        except RecursionError:
            raise self._too_deep() from None
        except TooLong:
            raise DefiniteError(
                f"{self.what} has a number that is too long for multipleOf",
                detail=f"Written out, it has more than {MOST_DIGITS} digits.",
                hint="Correct it at its source, or drop multipleOf from the schema.",
            ) from None
        raise DefiniteError(
            f"{self.what} does not match its schema at "
            f'"{failure.location}", which is {failure.found}',
            detail=f'The keyword "{failure.keyword}" refuses it.',
            hint="Correct the document at its source, or the schema of the collection.",
        )

    def _apply(
        self,
        applied: Applied,
        left: Document | Absent,
        right: Document,
        *,
        full: bool,
        marks: Applied | None,
    ) -> Document:
        try:
            return applied_to(applied, left, right, full=full, marks=marks)
        except RecursionError:
            raise self._too_deep() from None
        except Mismatch as mismatch:
            where = show_pointer(reversed(mismatch.path))
            raise DefiniteError(
                f'{mismatch.strategy.name} at "{where}" of a {self.what} '
                f"cannot reduce {kind_of(mismatch.right)} into {kind_of(mismatch.left)}",
                detail=f"It needs {mismatch.needs}.",
                hint="Correct the documents at their source, or choose another strategy there; "
                "a schema that gives the type refuses such a document before it is reduced.",
            ) from None

    def _too_deep(self) -> DefiniteError:
        return DefiniteError(
            f"{self.what} is nested too deeply",
            hint="Flatten it at its source; about two hundred levels can be reduced.",
        )
