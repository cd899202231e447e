"""Short run of the nemesis; `make soak` runs it longer."""

import os

from tests.ingest.nemesis import play
from tests.nemesis_driver import Tally

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)


def test_nemesis_run_of_ingest_finds_no_violation() -> None:
    tally = Tally("ingest")
    wrong = play(SEED, 15, tally, processes=False)
    assert not wrong, "\n".join(wrong[:10])
    assert tally.faults.total() > 0
    assert tally.observations.total() > 0
