"""What one tick does to a collection, several times over."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import DefiniteError
from penstock.persist import CollectionErrored
from penstock.testing.sources import ScriptedSource
from tests.ingest.test_loop import turn

__all__ = ["turn"]


class Fickle(ScriptedSource):
    """Its collection fails and recovers as it is told, in its ticks."""

    def __init__(self) -> None:
        super().__init__("kafka")
        self.deeds: list[str] = []

    def draw(self, tick: Any, upto: Any) -> Any:
        drawn = super().draw(tick, upto)
        for deed in self.deeds:
            if deed == "recover":
                tick.recover(self.collection)
            else:
                tick.fail(self.collection, DefiniteError(deed))
        self.deeds = []
        return drawn


@pytest.mark.parametrize(
    "deeds", [["recover", "again"], ["recover", "again", "recover", "once more"]]
)
def test_what_recovers_and_fails_in_one_tick_stays_in_its_first_error(
    turn: Callable[..., Any], deeds: list[str]
) -> None:
    source = Fickle()
    run = turn(source)
    uppers = []
    for at, told in enumerate(([], ["first"], deeds, ["recover"])):
        source.append(0, f"word {at}")
        source.deeds = list(told)
        run.ticks(1)
        uppers.append(run.client.collection("words").upper)
    words = run.client.collection("words")
    for upper in uppers[1:3]:
        with pytest.raises(CollectionErrored, match="first"):
            words.snapshot(upper - 1)
    assert [data["word"] for data, _, _ in words.snapshot(uppers[3] - 1)]
