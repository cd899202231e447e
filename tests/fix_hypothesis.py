"""Hypothesis profiles of all property tests.

There are no deadlines, because machines are shared, and no example database: the seed
alone decides the examples. `make test` prints it, and `SEED=n` replays a run. Mutation
testing runs each test often and uses fewer examples.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "house",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("mutants", settings.get_profile("house"), max_examples=20)
settings.load_profile("house")
