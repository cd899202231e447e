"""Whether a combined document says what its parts did.

A condition in the schema may hold of the two together and of neither alone: a sum that
has come to zero, an object that has grown. Then the combined document would be followed
in another way than its parts, one after the other, would have been.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.reduce.applied import NOTHING, Applied
from penstock.reduce.document import ABSENT, Document, Pointer, rank_by
from penstock.reduce.strategy import DEFAULT, Maximize, Merge, Minimize, Set

__all__ = ["is_faithful"]

_Key: TypeAlias = tuple[Pointer, ...]


def is_faithful(
    now: Applied,
    applied: Applied,
    marks: Applied,
    left: Document,
    right: Document,
    value: Document,
) -> bool:
    """Whether `value`, which `right` made of `left`, says `now` what the two said."""
    if value is right:
        return _alike(now, applied)
    if value is left:
        return _alike(now, marks)
    strategy = applied.strategy
    if now.strategy != strategy or now.deletes != applied.deletes:
        return False
    if isinstance(strategy, Set):
        none: dict[str, Document] = {}
        return all(
            _are_faithful(
                strategy.key,
                *(each.inside.get(term, NOTHING) for each in (now, applied, marks)),
                *(each.get(term, none) for each in (left, right, value)),
            )
            for term in value
        )
    if isinstance(strategy, (Merge, Minimize, Maximize)):
        key = strategy.key if isinstance(strategy, Merge) else ()
        return _are_faithful(key, now, applied, marks, left, right, value)
    return True


def _are_faithful(
    key: _Key, now: Applied, applied: Applied, marks: Applied, left: Any, right: Any, value: Any
) -> bool:
    ours, theirs = _places(key, left), _places(key, right)
    for at, (place, item) in _places(key, value).items():
        says = now.inside.get(place, NOTHING)
        stood, before = ours.get(at, (place, ABSENT))
        said = marks.inside.get(stood, NOTHING)
        if at not in theirs:
            if not _alike(says, said):
                return False
            continue
        came, after = theirs[at]
        told = applied.inside.get(came, NOTHING)
        if not is_faithful(says, told, said, before, after, item):
            return False
    return True


def _places(key: _Key, items: Any) -> dict[Any, tuple[str | int, Document]]:
    if type(items) is dict:
        return {name: (name, value) for name, value in items.items()}
    return {rank_by(key, item) if key else i: (i, item) for i, item in enumerate(items)}


def _alike(one: Applied, other: Applied) -> bool:
    """Whether they say the same, as far as it matters."""
    strategy = one.strategy or DEFAULT
    if strategy != (other.strategy or DEFAULT) or one.deletes != other.deletes:
        return False
    if isinstance(strategy, Set):
        return _are_alike(one, other, _are_alike)
    return not isinstance(strategy, (Merge, Minimize, Maximize)) or _are_alike(one, other)


def _are_alike(
    one: Applied, other: Applied, alike: Callable[[Applied, Applied], bool] = _alike
) -> bool:
    return all(
        alike(one.inside.get(name, NOTHING), other.inside.get(name, NOTHING))
        for name in one.inside.keys() | other.inside.keys()
    )
