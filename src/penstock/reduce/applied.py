"""The strategies that apply to one document, location by location."""

from dataclasses import dataclass, field
from typing import Final

from penstock.reduce.strategy import LastWriteWins, Merge, Strategy

__all__ = ["NOTHING", "Applied", "join"]


@dataclass(slots=True)
class Applied:
    """The strategies of one location and of those inside it.

    Nobody changes one; but freezing it would double what it costs to make one, and one
    is made for nearly every object of every document.
    """

    strategy: Strategy | None
    """None is the default, the last write."""
    inside: dict[str | int, "Applied"] = field(default_factory=dict)
    """Only what has one."""

    @property
    def deletes(self) -> bool:
        """Whether a full reduction leaves nothing here."""
        return isinstance(self.strategy, (LastWriteWins, Merge)) and self.strategy.delete


NOTHING: Final = Applied(None)


def join(under: Applied, over: Applied) -> Applied:
    """Both, and where both say something what `over` says."""
    if over is NOTHING:
        return under
    if under is NOTHING:
        return over
    inside = dict(under.inside)
    for name, each in over.inside.items():
        inside[name] = join(inside[name], each) if name in inside else each
    return Applied(over.strategy or under.strategy, inside)
