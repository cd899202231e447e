"""Combination and reduction of the documents of one key, in source order.

*Combining* is partial: the preceding documents are not known, so tombstones remain, and two
documents that cannot be combined without them stay separate. *Reducing* is full: it starts
from the stored document, or from none. The result does not depend on batch boundaries:

    reduce(left, a, b, c) = reduce(left, combine(a, b, c)) = reduce(reduce(left, a), b, c)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import DefiniteError
from penstock.reduce.annotation import Schema
from penstock.reduce.apply import Mismatch, NotAssociative, reduce_values
from penstock.reduce.document import ABSENT, Absent, Document, kind_of, show_pointer
from penstock.reduce.faithful import is_faithful
from penstock.reduce.number import MOST_DIGITS, TooLong
from penstock.reduce.strategy_tree import StrategyTree

__all__ = ["Reduced", "Reducer"]

_FEW: Final = 32


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduced document of a key."""

    document: Document | Absent
    deleted: bool = False
    """The document is a tombstone. The caller decides whether to store it."""


class Reducer:
    """Reducer of the documents of a collection, by its schema.

    Args:
        schema: A JSON schema with `reduce` annotations, as parsed from JSON or YAML.
        collection: Name of the collection, for error messages.

    Raises:
        UsageError: The schema is invalid or uses an unsupported keyword.
    """

    def __init__(self, schema: Any, collection: str) -> None:
        self._args = schema, collection
        self.what = f'document of collection "{collection}"'
        """The kind of document, for error messages."""
        self._schema = Schema(schema)
        self._tracks_left = self._schema.deletes or self._schema.varies

    @property
    def schema(self) -> Any:
        """The schema as passed to the constructor."""
        return self._args[0]

    def __reduce__(self) -> tuple[Callable[..., "Reducer"], tuple[Any, str]]:
        # Compiled functions cannot be pickled: the receiver compiles the schema again.
        return Reducer, self._args

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reducer) and self._args == other._args

    def __hash__(self) -> int:
        return hash(self.what)

    def check(self, document: Document) -> None:
        """Raise DefiniteError if `document` does not match the schema."""
        self._strategies_of(document)

    def combine(self, documents: Iterable[Document]) -> list[Document]:
        """Return the fewest documents that have the same effect as `documents`.

        Raises:
            DefiniteError: A document does not match the schema, or cannot be combined.
        """
        documents = list(documents)
        # In groups: combining one by one into a growing document copies all of it at every step.
        while len(documents) > 2 * _FEW:
            parts = (documents[start : start + _FEW] for start in range(0, len(documents), _FEW))
            fewer = [document for part in parts for document in self._combine_few(part)]
            stuck = 2 * len(fewer) > len(documents)
            documents = fewer
            if stuck:
                break
        return self._combine_few(documents)

    def _combine_few(self, documents: Sequence[Document]) -> list[Document]:
        combined: list[tuple[Document, StrategyTree, bool]] = []
        for right in documents:
            strategies = self._strategies_of(right)
            both = self._combine_pair(*combined[-1][:2], right, strategies) if combined else None
            if both is None:
                combined.append((right, strategies, False))
            else:
                combined[-1] = both
        for document, _, is_new in combined:
            if is_new and not self._tracks_left:
                self._strategies_of(document)
        return [document for document, _, _ in combined]

    def _combine_pair(
        self,
        left: Document,
        left_strategies: StrategyTree,
        right: Document,
        strategies: StrategyTree,
    ) -> tuple[Document, StrategyTree, bool] | None:
        """Return the combination, its strategies and whether it is new; None if not combinable."""
        try:
            both = self._apply(
                strategies,
                left,
                right,
                full=False,
                left_strategies=left_strategies if self._tracks_left else None,
            )
        except NotAssociative:
            return None
        is_new = both is not left and both is not right
        if not self._tracks_left:
            return both, strategies, is_new
        both_strategies = self._strategies_of(both)
        return (
            (both, both_strategies, is_new)
            if is_faithful(both_strategies, strategies, left_strategies, left, right, both)
            else None
        )

    def reduce(
        self,
        documents: Iterable[Document],
        *,
        left: Document | Absent = ABSENT,
        keep_deleted: bool = False,
    ) -> Reduced:
        """Reduce `documents` into the stored document, if there is one.

        Args:
            documents: Documents in source order.
            left: The stored document.
            keep_deleted: If true, a deletion is only a mark, and later documents are reduced into
                the deleted document. Otherwise they start from nothing.

        Raises:
            DefiniteError: A document does not match the schema, or cannot be reduced.
        """
        documents = list(documents)
        if len(documents) > 2 * _FEW:
            documents = self.combine(documents)
        reduced = Reduced(left)
        is_new = False
        for right in documents:
            strategies = self._strategies_of(right)
            before = ABSENT if reduced.deleted and not keep_deleted else reduced.document
            after = self._apply(strategies, before, right, full=True, left_strategies=None)
            reduced = Reduced(after, strategies.deletes)
            is_new = after is not right
        if is_new and not reduced.deleted:
            self._strategies_of(reduced.document)
        return reduced

    def _strategies_of(self, document: Document) -> StrategyTree:
        try:
            strategies = self._schema.visit(document)
            if strategies is not None:
                return strategies
            failure = self._schema.explain(document)
        except RecursionError:
            raise self._too_deep() from None
        except TooLong:
            raise DefiniteError(
                f"{self.what} has a number that is too long for multipleOf",
                detail=f"In positional notation, the number has more than {MOST_DIGITS} digits.",
                hint="Correct the number in the source, or remove multipleOf from the schema.",
            ) from None
        raise DefiniteError(
            f"{self.what} does not match its schema at "
            f'"{failure.location}", which is {failure.found}',
            detail=f'The keyword "{failure.keyword}" rejects the value.',
            hint="Correct the document in the source, or the schema of the collection.",
        )

    def _apply(
        self,
        strategies: StrategyTree,
        left: Document | Absent,
        right: Document,
        *,
        full: bool,
        left_strategies: StrategyTree | None,
    ) -> Document:
        try:
            return reduce_values(
                strategies, left, right, full=full, left_strategies=left_strategies
            )
        except RecursionError:
            raise self._too_deep() from None
        except Mismatch as mismatch:
            where = show_pointer(reversed(mismatch.path))
            raise DefiniteError(
                f'{mismatch.strategy.name} at "{where}" of a {self.what} '
                f"cannot reduce {kind_of(mismatch.right)} into {kind_of(mismatch.left)}",
                detail=f"The strategy requires {mismatch.needs}.",
                hint="Correct the documents in the source, or change the strategy of the location. "
                "Add a type to the schema to reject such documents before they are reduced.",
            ) from None

    def _too_deep(self) -> DefiniteError:
        return DefiniteError(
            f"{self.what} is nested too deeply",
            hint="Flatten the document in the source; about 200 levels are supported.",
        )
