"""Strategies of one document, by location."""

from dataclasses import dataclass, field
from typing import Final

from penstock.reduce.strategy import LastWriteWins, Merge, Strategy

__all__ = ["NOTHING", "StrategyTree", "join"]


@dataclass(slots=True)
class StrategyTree:
    """The strategies of one location and of the locations inside it.

    Immutable by convention: a frozen dataclass costs twice as much to construct, and nearly
    every object of every document has an instance.
    """

    strategy: Strategy | None
    """None is the default: last write wins."""
    inside: dict[str | int, "StrategyTree"] = field(default_factory=dict)
    """Contains only locations with a strategy at or below them."""

    @property
    def deletes(self) -> bool:
        """Return whether a full reduction removes this location."""
        return isinstance(self.strategy, (LastWriteWins, Merge)) and self.strategy.delete


NOTHING: Final = StrategyTree(None)


def join(under: StrategyTree, over: StrategyTree) -> StrategyTree:
    """Merge two trees; where both have a strategy, `over` has priority."""
    if over is NOTHING:
        return under
    if under is NOTHING:
        return over
    inside = dict(under.inside)
    for name, tree in over.inside.items():
        inside[name] = join(inside[name], tree) if name in inside else tree
    return StrategyTree(over.strategy or under.strategy, inside)
