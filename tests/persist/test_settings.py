import pytest

from penstock.errors import UsageError
from penstock.persist import Settings


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 0) for name in ("cache_bytes", "inline_bytes", "patience_ms")),
        *((name, 0) for name in ("upkeep_ms", "settle_ms", "young_ms", "proof_ms")),
        *((name, 1) for name in ("part_bytes", "merge_bytes")),
        *((name, 1) for name in ("rollup_every", "lease_ms", "poll_ms")),
        ("fan_in", 2),
    ],
)
def test_settings_below_minimum_raise_usage_error_with_name(name, least):
    assert getattr(Settings(**{name: least}), name) == least
    with pytest.raises(UsageError, match=f'setting "{name}" is {least - 1}'):
        Settings(**{name: least - 1})
