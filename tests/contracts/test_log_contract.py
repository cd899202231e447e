"""Contract of `Log`, on every store."""

import pytest
from tests.contracts.stores import Opener, vector

from penstock.durable.log import Log, entry_key
from penstock.errors import Corruption, UsageError


def test_log_vector_p16_write_truncate_close_matches_results(opener: Opener) -> None:
    case = vector("P16")
    story = Story(opener)
    assert [story.obey(*operation) for operation in case["given"]["ops"]] == case["expect"][
        "results"
    ]


class Story:
    """Log driven by the operations of the vectors, which do not number entries."""

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


def test_log_read_from_stops_at_first_missing_entry(opener: Opener) -> None:
    log = Log(opener())
    for number in (0, 1, 2, 4):
        assert log.create(number, b"%d" % number)
    assert log.read_from(0, limit=10) == [b"0", b"1", b"2"]
    assert log.read_from(1, limit=1) == [b"1"]
    assert log.read(3) is None


def test_log_nothing_beyond_with_gap_raises_corruption(opener: Opener) -> None:
    log = Log(opener())
    for number in (0, 1, 3):
        log.create(number, b"")
    with pytest.raises(Corruption, match=entry_key(2)):
        log.nothing_beyond(2)
    log.nothing_beyond(4)


def test_log_sweep_deletes_late_entry_below_floor(opener: Opener) -> None:
    log = Log(opener())
    for number in range(4):
        log.create(number, b"")
    log.truncate(3, head=4)
    assert log.entries() == [3]
    assert log.create(1, b"late")  # A writer that was paused, hazard A1.
    assert log.marks().floor == 3
    log.sweep()
    assert log.entries() == [3]


def test_log_head_mark_survives_loss_of_last_entry(opener: Opener) -> None:
    blob = opener()
    log = Log(blob)
    for number in range(3):
        log.create(number, b"")
    log.witness(3)
    blob.delete(entry_key(2))
    assert log.marks().head == 3
    assert log.read(2) is None
