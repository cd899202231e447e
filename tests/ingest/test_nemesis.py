"""A short run of the nemesis; `make soak` gives it all the time there is."""

import os

from tests.ingest.nemesis import play

SEED = int(os.environ.get("PENSTOCK_TEST_SEED") or 2_026)


def test_no_promise_is_broken() -> None:
    wrong = play(SEED, 15, processes=False)
    assert not wrong, "\n".join(wrong[:10])
