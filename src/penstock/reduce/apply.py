"""Two values at one location become one, as the strategy of the right one says.

A *full* reduction knows that what is left is all there is: it deletes, drops what a set
was told to remove, and lets a value change its type. A *partial* one combines changes
among themselves, with more to come on either side, and must not do what would come out
differently with the parentheses elsewhere. Then it keeps the two apart:

    {a: 1} · ("x" · {b: 2})   would be {a: 1, b: 2}
    ({a: 1} · "x") · {b: 2}   is {b: 2}

For the same reason a partial reduction looks at the strategy of the left value too. A
merge into a tombstone, or into what itself replaced what was before it, says something
that the merged value, by itself, no longer says.
"""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Final, TypeAlias

from penstock.reduce import shapes
from penstock.reduce.applied import NOTHING, Applied
from penstock.reduce.document import ABSENT, Absent, Document, Pointer, rank, rank_by
from penstock.reduce.number import MOST_DIGITS, TooLong, add, total_of
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

__all__ = ["Apart", "Mismatch", "applied_to"]

_at: Final = itemgetter(0)

_Key: TypeAlias = tuple[Pointer, ...]
_Place: TypeAlias = tuple[str | int, Document]
"""Where an item stands on its own side, and the item."""


class Apart(Exception):
    """A partial reduction of the two would not be associative."""


class Mismatch(Exception):
    """The strategy does not go with these two values."""

    def __init__(
        self, strategy: Strategy, left: Document | Absent, right: Document, needs: str
    ) -> None:
        super().__init__()
        self.strategy, self.left, self.right, self.needs = strategy, left, right, needs
        self.path: list[str | int] = []
        """From the location outwards."""


def applied_to(
    applied: Applied, left: Document | Absent, right: Document, *, full: bool, marks: Applied | None
) -> Document:
    """What `right`, whose strategies are `applied`, makes of `left`. Neither is changed.

    In a full reduction `left` is all there is; in a partial one `marks` are its strategies,
    if they have to be minded.

    Raises:
        Apart: in a partial reduction.
        Mismatch: by no reduction.
    """
    strategy = applied.strategy
    if strategy is None:
        return right
    if type(strategy) is LastWriteWins:
        if strategy.associative or full or left is ABSENT or rank(left) == rank(right):
            return right
        raise Apart
    value = _APPLY[type(strategy)](strategy, applied, left, right, full, marks)
    if marks is None or left is ABSENT:
        return value
    if marks.deletes or (marks.strategy != strategy and value is not left):
        raise Apart
    return value


def _first(_strategy: Any, _applied: Any, left: Any, right: Any, *_: Any) -> Document:
    return right if left is ABSENT else left


def _append(strategy: Append, _applied: Any, left: Any, right: Any, *_: Any) -> Document:
    if type(right) is list:
        if left is ABSENT:
            return right
        if type(left) is list:
            return left + right if right else left
        if left is None:
            return left
    raise Mismatch(strategy, left, right, "two arrays")


def _sum(strategy: Sum, _applied: Any, left: Any, right: Any, *_: Any) -> Document:
    try:
        total = total_of(right) if left is ABSENT else add(left, right)
    except TooLong:
        raise Mismatch(
            strategy, left, right, f"numbers of at most {MOST_DIGITS} digits, written out"
        ) from None
    if total is None:
        raise Mismatch(strategy, left, right, "numbers, or strings that hold numbers")
    return total


def _extreme(
    strategy: Minimize | Maximize,
    applied: Applied,
    left: Document | Absent,
    right: Document,
    full: bool,
    marks: Applied | None,
) -> Document:
    key = strategy.key
    ahead = False
    if left is not ABSENT:
        was, now = rank_by(key, left), rank_by(key, right)
        if (was < now) if type(strategy) is Minimize else (was > now):
            return left
        ahead = was != now
    if not key or type(right) not in (dict, list):
        if ahead or left is ABSENT or not key or rank(left) == rank(right):
            return right
        raise Mismatch(strategy, left, right, "objects or arrays where the keys are equal")
    return _merged((), strategy, applied, ABSENT if ahead else left, right, full, marks)


def _merge(
    strategy: Merge,
    applied: Applied,
    left: Document | Absent,
    right: Document,
    full: bool,
    marks: Applied | None,
) -> Document:
    return _merged(strategy.key, strategy, applied, left, right, full, marks)


def _merged(
    key: _Key,
    strategy: Strategy,
    applied: Applied,
    left: Document | Absent,
    right: Document,
    full: bool,
    marks: Applied | None,
) -> Document:
    kind = type(right)
    if kind is not dict and kind is not list:
        raise Mismatch(strategy, left, right, "objects or arrays")
    if type(left) is not kind:
        if not full:
            if left is ABSENT:
                return right
            raise Apart
        left = kind()
    both = _Both(applied, full, marks)
    if type(left) is dict:
        merged = {**left, **right}
        for name in applied.inside:
            both.put(merged, name, left.get(name, ABSENT), name, (name, right[name]))
        return merged
    if not key:
        items = dict(enumerate(left))
        for i, item in enumerate(right):
            both.put(items, i, left[i] if i < len(left) else ABSENT, i, (i, item))
        return list(items.values())
    ours, theirs = (_by_key(key, each, strategy, left, right) for each in (left, right))
    return list(both.union(ours, theirs).values())


class _Both:
    """What is on two sides, item by item."""

    def __init__(self, applied: Applied, full: bool, marks: Applied | None) -> None:
        self._inside, self._full = applied.inside, full
        self._marks = None if marks is None else marks.inside

    def put(
        self, into: dict[Any, Document], at: Any, left: Document | Absent, stood: Any, right: _Place
    ) -> None:
        """What comes of the two at `at`, if anything; `stood` is where the left one stood."""
        place, value = right
        applied = self._inside.get(place)
        if applied is None:
            into[at] = value
            return
        if self._full and applied.deletes:
            into.pop(at, None)
            return
        marks = None if self._marks is None else self._marks.get(stood, NOTHING)
        try:
            into[at] = applied_to(applied, left, value, full=self._full, marks=marks)
        except Mismatch as mismatch:
            mismatch.path.append(place)
            raise

    def union(self, ours: dict[Any, _Place], theirs: dict[Any, _Place]) -> dict[Any, Document]:
        """The items of both, by key and in its order; those in both become one."""
        items = _items(ours)
        for at, right in theirs.items():
            stood, left = ours.get(at, (None, ABSENT))
            self.put(items, at, left, stood, right)
        return dict(sorted(items.items(), key=_at))


def _items(places: dict[Any, _Place]) -> dict[Any, Document]:
    return {at: item for at, (_, item) in places.items()}


def _by_key(
    key: _Key, items: Iterable[Document], strategy: Strategy, left: Document, right: Document
) -> dict[Any, _Place]:
    """The items by their key, in whose order they must be, each once."""
    found: dict[Any, _Place] = {}
    last: Any = None
    for i, item in enumerate(items):
        at = rank_by(key, item)
        if last is not None and not last < at:
            raise Mismatch(strategy, left, right, "arrays in the order of the key, each key once")
        last = at
        found[at] = i, item
    return found


_TERMS: Final = ("add", "intersect", "remove")


def _set(
    strategy: Set,
    applied: Applied,
    left: Document | Absent,
    right: Document,
    full: bool,
    marks: Applied | None,
) -> Document:
    if left is ABSENT and full:
        left = {}
    sides = [right] if left is ABSENT else [left, right]
    if not all(
        type(side) is dict and side.keys() <= set(_TERMS) and len(side.keys() - {"add"}) < 2
        for side in sides
    ):
        raise Mismatch(
            strategy, left, right, "objects of add, and of intersect or remove, and nothing else"
        )
    kinds = {type(term) for side in sides for term in side.values()}
    if kinds not in ({dict}, set()) and not (kinds == {list} and strategy.key):
        raise Mismatch(strategy, left, right, "objects in all terms, or arrays in all and a key")
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
        inner = applied.inside.get(term, NOTHING)
        both = _Both(inner, full, marks and marks.inside.get(term, NOTHING))
        try:
            items = both.union(ours or {}, theirs or {})
        except Mismatch as mismatch:
            mismatch.path.append(term)
            raise
        made[term] = list(items.values()) if kinds == {list} else items

    made: dict[str, Document] = {}
    our_adds, our_keeps, our_removes = (keyed(left, term) for term in _TERMS)
    adds, keeps, removes = (keyed(right, term) for term in _TERMS)
    union("add", _only(our_adds, keeps, removes), adds)
    if full:
        return made
    if our_keeps is not None:
        union("intersect", _only(our_keeps, keeps, removes), _only(keeps, our_keeps, None))
    elif keeps is not None:
        union("intersect", None, _only(keeps, None, our_removes))
    else:
        union("remove", our_removes, removes)
    return made


def _only(
    places: dict[Any, _Place] | None,
    keeps: dict[Any, _Place] | None,
    removes: dict[Any, _Place] | None,
) -> dict[Any, _Place] | None:
    """Those that are among `keeps`, if there are such, and not among `removes`."""
    if places is None:
        return None
    return {
        at: place
        for at, place in places.items()
        if (keeps is None or at in keeps) and (removes is None or at not in removes)
    }


def _schemas(strategy: JsonSchemaMerge, _applied: Any, left: Any, right: Any, *_: Any) -> Document:
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
