"""The room shows what its files do, its examples run, and its values travel."""

import copy
import doctest
import pickle
from types import ModuleType

import pytest

from penstock import progress
from penstock.progress import (
    Antichain,
    Description,
    Interval,
    PartitionedFrontier,
    PartitionedTime,
    Update,
    antichain,
    interval,
    order,
    update,
)

FILES = [antichain, interval, order, update]


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


def test_the_front_door_shows_what_every_file_does() -> None:
    assert sorted(progress.__all__) == sorted(name for file in FILES for name in file.__all__)
    assert all(hasattr(progress, name) for name in progress.__all__)


@pytest.mark.parametrize(
    "value",
    [
        Update("a", 3, +1),
        Interval(3, 5),
        Description(Interval(3, 5), since=4),
        PartitionedTime.between("a", None, offset=3),
        Antichain.of(PartitionedTime.exactly(3, offset=3)),
        PartitionedFrontier.of({"a": 3, "b": 4}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_can_be_sent_to_an_executor(value: object) -> None:
    for arrived in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert arrived == value
        assert hash(arrived) == hash(value)
        assert repr(arrived) == repr(value)
