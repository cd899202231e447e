"""A log keeps its promises on every store."""

import pytest
from tests.contracts.stores import Opener, vector

from penstock.durable.log import Log, entry_key
from penstock.errors import Corruption, UsageError


def test_vector_p16_numbers_truncation_and_closing(opener: Opener) -> None:
    case = vector("P16")
    story = Story(opener)
    assert [story.obey(*operation) for operation in case["given"]["ops"]] == case["expect"][
        "results"
    ]


class Story:
    """A log as the vectors know it: it numbers entries itself."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._reopen()

    def obey(self, verb: str, argument: str | int = "") -> object:
        try:
            match verb:
                case "write":
                    number = self._head
                    assert self._log.create(number, str(argument).encode())
                    self._head += 1
                    return number
                case "truncate":
                    self._log.truncate(int(argument), head=self._head)
                case "close":
                    return self._blob.close()
                case _:
                    self._reopen()
        except UsageError:
            return "error"
        return "ok"

    def _reopen(self) -> None:
        self._blob = self._opener()
        self._log = Log(self._blob)
        self._head = self._log.marks().head
        while self._log.read(self._head) is not None:
            self._head += 1


def test_entries_are_read_up_to_the_first_missing(opener: Opener) -> None:
    log = Log(opener())
    for number in (0, 1, 2, 4):
        assert log.create(number, b"%d" % number)
    assert log.read_from(0, limit=10) == [b"0", b"1", b"2"]
    assert log.read_from(1, limit=1) == [b"1"]
    assert log.read(3) is None


def test_a_hole_in_the_log_is_corruption(opener: Opener) -> None:
    log = Log(opener())
    for number in (0, 1, 3):
        log.create(number, b"")
    with pytest.raises(Corruption, match=entry_key(2)):
        log.nothing_beyond(2)
    log.nothing_beyond(4)


def test_entries_below_the_floor_are_swept_even_if_they_come_late(opener: Opener) -> None:
    log = Log(opener())
    for number in range(4):
        log.create(number, b"")
    log.truncate(3, head=4)
    assert log.entries() == [3]
    assert log.create(1, b"late")  # A writer that was paused; hazard A1.
    assert log.marks().floor == 3
    log.sweep()
    assert log.entries() == [3]


def test_a_witness_tells_of_a_lost_head(opener: Opener) -> None:
    blob = opener()
    log = Log(blob)
    for number in range(3):
        log.create(number, b"")
    log.witness(3)
    blob.delete(entry_key(2))
    assert log.marks().head == 3
    assert log.read(2) is None
