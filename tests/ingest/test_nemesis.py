"""A short run of the nemesis; `make soak` gives it all the time there is."""

import os

from tests.ingest.nemesis import play
from tests.nemesis_driver import Tally

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)


def test_no_promise_is_broken() -> None:
    tally = Tally("ingest")
    wrong = play(SEED, 15, tally, processes=False)
    assert not wrong, "\n".join(wrong[:10])
    assert tally.faults.total() > 0
    assert tally.observations.total() > 0
