"""`penstock up` and `penstock ingest` that another process replaces."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.cli.signals import FENCED
from penstock.servers.postgres import Database
from tests.e2e.process import Up, lines, until, well

HTTP = ("--http", "127.0.0.1:0")

PIPELINE = """\
location: file:./lake
writer: desk
tick: 250ms
sources:
  shop:
    postgres: {{url: "{url}", tables: [public.item]}}
materializations:
  local:
    connector: sqlite
    endpoint: {{path: ./local.db}}
    bindings: [{{collection: shop.public.item, resource: {{table: item}}}}]
"""


@pytest.fixture
def file(database: Database, tmp_path: Path) -> str:
    database.sql("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE.format(url=database.url()))
    return "pipeline.yaml"


def check_output(output: str) -> None:
    """Check that the process has reported only that it was fenced, after lines of progress."""
    report = [line for line in output.splitlines() if not line.startswith(("shop: ", "local: "))]
    assert [line.partition(":")[0] for line in report] == ["error", "detail", "hint"], output
    assert "was fenced" in report[0]
    assert "taken over by" in report[1]


@pytest.mark.spark
def test_fenced_up_reports_only_that_and_exits_with_3(
    database: Database, tmp_path: Path, file: str
) -> None:
    def stored() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "local.db")) as endpoint:
            return [id for (id,) in endpoint.execute("SELECT id FROM item ORDER BY id")]

    with Up(tmp_path, "up", file, *HTTP) as first:
        first.await_ready("shop", "local")
        before = len(first.output())
        log = tmp_path / "second.log"
        with Up(tmp_path, "up", file, *HTTP, "--take-over", log=log) as second:
            assert first.wait() == FENCED == 3
            second.await_ready("shop", "local")
            database.sql("INSERT INTO item VALUES (2)")
            until(lambda: stored() == [1, 2], "the row of the new process")
            assert second.terminate() == 0
            assert "Traceback" not in second.output()
    check_output(first.output()[before:])


def test_ingest_fenced_while_suspended_reports_only_that_and_exits_with_3(
    database: Database, tmp_path: Path, file: str
) -> None:
    def stored() -> list[int]:
        rows = lines(well(tmp_path, "read", "file:./lake", "shop.public.item"))
        return sorted(row["id"] for row in rows)

    with Up(tmp_path, "ingest", file, *HTTP) as first:
        first.await_ready("shop")
        before = len(first.output())
        first.pause()
        log = tmp_path / "second.log"
        with Up(tmp_path, "ingest", file, *HTTP, "--take-over", log=log) as second:
            second.await_ready("shop")
            database.sql("INSERT INTO item VALUES (2)")
            until(lambda: stored() == [1, 2], "the row of the new process")
            first.resume()
            assert first.wait() == FENCED
            second.check()
            assert second.terminate() == 0
    check_output(first.output()[before:])
