"""Reduction of two values at one location, by the strategy of the right value.

A *full* reduction has the complete left value: it deletes, drops the removed members of a
set, and may change the type of a value. A *partial* reduction combines changes, with more
changes possible on both sides. It must be associative, and otherwise raises
`NotAssociative`, which keeps the two changes separate:

    {a: 1} · ("x" · {b: 2})   would be {a: 1, b: 2}
    ({a: 1} · "x") · {b: 2}   is {b: 2}

For the same reason a partial reduction compares the strategy of the left value: a merge
into a tombstone, or into a value that replaced its predecessor, loses that information.
"""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Final, TypeAlias

from penstock.reduce import shapes
from penstock.reduce.document import ABSENT, Absent, Document, Pointer, rank, rank_by
from penstock.reduce.number import MOST_DIGITS, TooLong, add, normalize
from penstock.reduce.strategy import (
    Append,
    FirstWriteWins,
    JsonSchemaMerge,
    LastWriteWins,
    Maximize,
    Merge,
    Minimize,
    Set,
    Strategy,
    Sum,
)
from penstock.reduce.strategy_tree import NOTHING, StrategyTree

__all__ = ["Mismatch", "NotAssociative", "reduce_values"]

_key_rank: Final = itemgetter(0)

_Key: TypeAlias = tuple[Pointer, ...]
_Place: TypeAlias = tuple[str | int, Document]
"""The place of an item on its side, and the item."""


class NotAssociative(Exception):
    """The partial reduction of two values would not be associative."""


class Mismatch(Exception):
    """The strategy does not accept the types of these two values."""

    def __init__(
        self, strategy: Strategy, left: Document | Absent, right: Document, needs: str
    ) -> None:
        super().__init__()
        self.strategy, self.left, self.right, self.needs = strategy, left, right, needs
        self.path: list[str | int] = []
        """Location of the mismatch, innermost token first."""


def reduce_values(
    strategies: StrategyTree,
    left: Document | Absent,
    right: Document,
    *,
    full: bool,
    left_strategies: StrategyTree | None,
) -> Document:
    """Reduce `right` into `left` by the strategies of `right`, without changing either.

    `left` is the complete value in a full reduction. In a partial reduction,
    `left_strategies` are the strategies of `left`, or None if the schema neither deletes
    nor varies.

    Raises:
        NotAssociative: In a partial reduction: the two changes must stay separate.
        Mismatch: No reduction of the two values is defined.
    """
    strategy = strategies.strategy
    if strategy is None:
        return right
    if type(strategy) is LastWriteWins:
        if strategy.associative or full or left is ABSENT or rank(left) == rank(right):
            return right
        raise NotAssociative
    value = _APPLY[type(strategy)](strategy, strategies, left, right, full, left_strategies)
    if left_strategies is None or left is ABSENT:
        return value
    if left_strategies.deletes or (left_strategies.strategy != strategy and value is not left):
        raise NotAssociative
    return value


def _first(_strategy: Any, _strategies: Any, left: Any, right: Any, *_: Any) -> Document:
    return right if left is ABSENT else left


def _append(strategy: Append, _strategies: Any, left: Any, right: Any, *_: Any) -> Document:
    if type(right) is list:
        if left is ABSENT:
            return right
        if type(left) is list:
            return left + right if right else left
        if left is None:
            return left
    raise Mismatch(strategy, left, right, "two arrays")


def _sum(strategy: Sum, _strategies: Any, left: Any, right: Any, *_: Any) -> Document:
    try:
        total = normalize(right) if left is ABSENT else add(left, right)
    except TooLong:
        raise Mismatch(
            strategy, left, right, f"numbers of at most {MOST_DIGITS} digits in positional notation"
        ) from None
    if total is None:
        raise Mismatch(strategy, left, right, "numbers, or strings that hold numbers")
    return total


def _extreme(
    strategy: Minimize | Maximize,
    strategies: StrategyTree,
    left: Document | Absent,
    right: Document,
    full: bool,
    left_strategies: StrategyTree | None,
) -> Document:
    key = strategy.key
    ahead = False
    if left is not ABSENT:
        left_rank, right_rank = rank_by(key, left), rank_by(key, right)
        if (left_rank < right_rank) if type(strategy) is Minimize else (left_rank > right_rank):
            return left
        ahead = left_rank != right_rank
    if not key or type(right) not in (dict, list):
        if ahead or left is ABSENT or not key or rank(left) == rank(right):
            return right
        raise Mismatch(strategy, left, right, "objects or arrays where the keys are equal")
    return _merged(
        (), strategy, strategies, ABSENT if ahead else left, right, full, left_strategies
    )


def _merge(
    strategy: Merge,
    strategies: StrategyTree,
    left: Document | Absent,
    right: Document,
    full: bool,
    left_strategies: StrategyTree | None,
) -> Document:
    return _merged(strategy.key, strategy, strategies, left, right, full, left_strategies)


def _merged(
    key: _Key,
    strategy: Strategy,
    strategies: StrategyTree,
    left: Document | Absent,
    right: Document,
    full: bool,
    left_strategies: StrategyTree | None,
) -> Document:
    kind = type(right)
    if kind is not dict and kind is not list:
        raise Mismatch(strategy, left, right, "objects or arrays")
    if type(left) is not kind:
        if not full:
            if left is ABSENT:
                return right
            raise NotAssociative
        left = kind()
    both = _PairReducer(strategies, full, left_strategies)
    if type(left) is dict:
        merged = {**left, **right}
        for name in strategies.inside:
            both.put(merged, name, left.get(name, ABSENT), name, (name, right[name]))
        return merged
    if not key:
        items = dict(enumerate(left))
        for i, item in enumerate(right):
            both.put(items, i, left[i] if i < len(left) else ABSENT, i, (i, item))
        return list(items.values())
    ours, theirs = (_by_key(key, items, strategy, left, right) for items in (left, right))
    return list(both.union(ours, theirs).values())


class _PairReducer:
    """Item-by-item reduction of two containers."""

    def __init__(
        self, strategies: StrategyTree, full: bool, left_strategies: StrategyTree | None
    ) -> None:
        self._inside, self._full = strategies.inside, full
        self._left_inside = None if left_strategies is None else left_strategies.inside

    def put(
        self,
        into: dict[Any, Document],
        item_key: Any,
        left: Document | Absent,
        left_place: Any,
        right: _Place,
    ) -> None:
        """Reduce the items of both sides into `into[item_key]`, or remove it.

        Args:
            into: The result.
            item_key: Key of the item in the result.
            left: Item of the left side.
            left_place: Place of the item on the left side.
            right: Place and item of the right side.
        """
        right_place, value = right
        strategies = self._inside.get(right_place)
        if strategies is None:
            into[item_key] = value
            return
        if self._full and strategies.deletes:
            into.pop(item_key, None)
            return
        left_strategies = (
            None if self._left_inside is None else self._left_inside.get(left_place, NOTHING)
        )
        try:
            into[item_key] = reduce_values(
                strategies, left, value, full=self._full, left_strategies=left_strategies
            )
        except Mismatch as mismatch:
            mismatch.path.append(right_place)
            raise

    def union(self, ours: dict[Any, _Place], theirs: dict[Any, _Place]) -> dict[Any, Document]:
        """Return the items of both sides, sorted by key; items on both sides are reduced."""
        items = _items(ours)
        for item_key, right in theirs.items():
            left_place, left = ours.get(item_key, (None, ABSENT))
            self.put(items, item_key, left, left_place, right)
        return dict(sorted(items.items(), key=_key_rank))


def _items(places: dict[Any, _Place]) -> dict[Any, Document]:
    return {item_key: item for item_key, (_, item) in places.items()}


def _by_key(
    key: _Key, items: Iterable[Document], strategy: Strategy, left: Document, right: Document
) -> dict[Any, _Place]:
    """Return the items by key; the array must be sorted by it, without duplicates."""
    places: dict[Any, _Place] = {}
    last: Any = None
    for i, item in enumerate(items):
        item_key = rank_by(key, item)
        if last is not None and not last < item_key:
            raise Mismatch(strategy, left, right, "arrays in the order of the key, each key once")
        last = item_key
        places[item_key] = i, item
    return places


_TERMS: Final = ("add", "intersect", "remove")


def _set(
    strategy: Set,
    strategies: StrategyTree,
    left: Document | Absent,
    right: Document,
    full: bool,
    left_strategies: StrategyTree | None,
) -> Document:
    if left is ABSENT and full:
        left = {}
    sides = [right] if left is ABSENT else [left, right]
    if not all(
        type(side) is dict and side.keys() <= set(_TERMS) and len(side.keys() - {"add"}) < 2
        for side in sides
    ):
        raise Mismatch(
            strategy,
            left,
            right,
            "objects with add and one of intersect or remove, and no other names",
        )
    kinds = {type(term) for side in sides for term in side.values()}
    if kinds not in ({dict}, set()) and not (kinds == {list} and strategy.key):
        raise Mismatch(
            strategy, left, right, "objects in all terms, or arrays in all terms and a key"
        )
    if left is ABSENT:
        return right

    def keyed(side: Document, term: str) -> dict[Any, _Place] | None:
        if term not in side:
            return None
        if kinds == {list}:
            return _by_key(strategy.key, side[term], strategy, left, right)
        return {name: (name, value) for name, value in side[term].items()}

    def union(term: str, ours: dict[Any, _Place] | None, theirs: dict[Any, _Place] | None) -> None:
        if ours is None and theirs is None:
            return
        inner = strategies.inside.get(term, NOTHING)
        both = _PairReducer(
            inner, full, left_strategies and left_strategies.inside.get(term, NOTHING)
        )
        try:
            items = both.union(ours or {}, theirs or {})
        except Mismatch as mismatch:
            mismatch.path.append(term)
            raise
        merged[term] = list(items.values()) if kinds == {list} else items

    merged: dict[str, Document] = {}
    our_adds, our_keeps, our_removes = (keyed(left, term) for term in _TERMS)
    adds, keeps, removes = (keyed(right, term) for term in _TERMS)
    union("add", _only(our_adds, keeps, removes), adds)
    if full:
        return merged
    if our_keeps is not None:
        union("intersect", _only(our_keeps, keeps, removes), _only(keeps, our_keeps, None))
    elif keeps is not None:
        union("intersect", None, _only(keeps, None, our_removes))
    else:
        union("remove", our_removes, removes)
    return merged


def _only(
    places: dict[Any, _Place] | None,
    keeps: dict[Any, _Place] | None,
    removes: dict[Any, _Place] | None,
) -> dict[Any, _Place] | None:
    """Return the places in `keeps`, if it is given, that are not in `removes`."""
    if places is None:
        return None
    return {
        item_key: place
        for item_key, place in places.items()
        if (keeps is None or item_key in keeps) and (removes is None or item_key not in removes)
    }


def _schemas(
    strategy: JsonSchemaMerge, _strategies: Any, left: Any, right: Any, *_: Any
) -> Document:
    if left is ABSENT:
        return right
    try:
        return shapes.union(left, right)
    except shapes.Unmergeable as unmergeable:
        mismatch = Mismatch(strategy, left, right, f"JSON schemas of plain shape: {unmergeable}")
        raise mismatch from None


_APPLY: Final[dict[type, Callable[..., Document]]] = {
    FirstWriteWins: _first,
    Append: _append,
    Sum: _sum,
    Minimize: _extreme,
    Maximize: _extreme,
    Merge: _merge,
    Set: _set,
    JsonSchemaMerge: _schemas,
}
