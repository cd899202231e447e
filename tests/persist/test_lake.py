import pytest

import penstock.persist as persist
from penstock.durable import open_blob
from penstock.errors import UsageError
from penstock.persist.store import check_not_a_lake

SETTINGS = persist.Settings(background=False, notify="")


def test_check_not_a_lake_with_lake_url_raises_usage_error(tmp_path):
    lake = f"file:{tmp_path}/lake"
    check_not_a_lake(lake, open_blob(lake, writing=True))
    persist.open(f"{lake}/shop", writer="w", settings=SETTINGS).close()
    with pytest.raises(UsageError, match="is a lake") as refused:
        check_not_a_lake(lake, open_blob(lake))
    assert f"{lake}/shop" in refused.value.hint
    check_not_a_lake(f"{lake}/shop", open_blob(f"{lake}/shop"))
    check_not_a_lake("memory:", open_blob("memory:"))
