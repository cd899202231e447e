"""One profile for every property test, here and in CI.

Deadlines are timings, and the machines are shared. The seed decides the
examples everywhere; `make test` prints it, and `SEED=n` replays a run.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")
