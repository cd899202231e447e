"""One profile for every property test, here and in CI.

Deadlines are timings, and the machines are shared. Nothing is remembered from
run to run: the seed alone decides the examples. `make test` prints it, and
`SEED=n` replays a run. Mutation testing runs each test often, so with fewer examples.
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
