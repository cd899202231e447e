"""Check that a combined document has the same effect as its parts.

A condition in the schema can hold for the combined document and for neither part: a sum
that becomes zero, an object that grows. The combined document would then be reduced in
another way than its parts, one after the other.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.reduce.document import ABSENT, Document, Pointer, rank_by
from penstock.reduce.strategy import DEFAULT, Maximize, Merge, Minimize, Set
from penstock.reduce.strategy_tree import NOTHING, StrategyTree

__all__ = ["is_faithful"]

_Key: TypeAlias = tuple[Pointer, ...]


def is_faithful(
    result: StrategyTree,
    right_strategies: StrategyTree,
    left_strategies: StrategyTree,
    left: Document,
    right: Document,
    value: Document,
) -> bool:
    """Return whether `value`, the reduction of `right` into `left`, has the effect of both.

    `result`, `right_strategies` and `left_strategies` are the strategies of `value`, `right`
    and `left`.
    """
    if value is right:
        return _is_equivalent(result, right_strategies)
    if value is left:
        return _is_equivalent(result, left_strategies)
    strategy = right_strategies.strategy
    if result.strategy != strategy or result.deletes != right_strategies.deletes:
        return False
    if isinstance(strategy, Set):
        none: dict[str, Document] = {}
        return all(
            _children_faithful(
                strategy.key,
                *(
                    source.inside.get(term, NOTHING)
                    for source in (result, right_strategies, left_strategies)
                ),
                *(source.get(term, none) for source in (left, right, value)),
            )
            for term in value
        )
    if isinstance(strategy, (Merge, Minimize, Maximize)):
        key = strategy.key if isinstance(strategy, Merge) else ()
        return _children_faithful(
            key, result, right_strategies, left_strategies, left, right, value
        )
    return True


def _children_faithful(
    key: _Key,
    result: StrategyTree,
    right_strategies: StrategyTree,
    left_strategies: StrategyTree,
    left: Any,
    right: Any,
    value: Any,
) -> bool:
    ours, theirs = _places(key, left), _places(key, right)
    for rank, (place, item) in _places(key, value).items():
        result_tree = result.inside.get(place, NOTHING)
        left_place, before = ours.get(rank, (place, ABSENT))
        left_tree = left_strategies.inside.get(left_place, NOTHING)
        if rank not in theirs:
            if not _is_equivalent(result_tree, left_tree):
                return False
            continue
        right_place, after = theirs[rank]
        right_tree = right_strategies.inside.get(right_place, NOTHING)
        if not is_faithful(result_tree, right_tree, left_tree, before, after, item):
            return False
    return True


def _places(key: _Key, items: Any) -> dict[Any, tuple[str | int, Document]]:
    if type(items) is dict:
        return {name: (name, value) for name, value in items.items()}
    return {rank_by(key, item) if key else i: (i, item) for i, item in enumerate(items)}


def _is_equivalent(one: StrategyTree, other: StrategyTree) -> bool:
    """Return whether two trees are equal at all locations that a reduction visits."""
    strategy = one.strategy or DEFAULT
    if strategy != (other.strategy or DEFAULT) or one.deletes != other.deletes:
        return False
    if isinstance(strategy, Set):
        return _children_equivalent(one, other, _children_equivalent)
    return not isinstance(strategy, (Merge, Minimize, Maximize)) or _children_equivalent(one, other)


def _children_equivalent(
    one: StrategyTree,
    other: StrategyTree,
    is_equivalent: Callable[[StrategyTree, StrategyTree], bool] = _is_equivalent,
) -> bool:
    return all(
        is_equivalent(one.inside.get(name, NOTHING), other.inside.get(name, NOTHING))
        for name in one.inside.keys() | other.inside.keys()
    )
