"""Commands in an environment without optional packages."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

import pytest

import penstock.persist as persist
from penstock.extras import EXTRAS, missing_extra

WITHOUT_EXTRAS: Final = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRAS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from penstock.cli.main import main
main()
"""

KAFKA: Final = '{kafka: {brokers: "127.0.0.1:1", topic: clicks, format: text}}'
POSTGRES: Final = '{postgres: {url: "postgresql://127.0.0.1:1/shop"}}'


def penstock(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process where no optional package can be imported."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_collection_is_read_without_extras(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with persist.open(url, writer="w") as client:
        words = client.create_or_load("words", key=persist.TEXT, value=persist.BIGINT)
        words.compare_and_append([(("hello", 1), 1, 1)], 0, 2)
    read = penstock("read", url, "words", folder=tmp_path)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout) == {"key": "hello", "value": 1}


def test_sqlite_connector_is_described_without_extras(tmp_path: Path) -> None:
    spec = penstock("connector", "spec", "sqlite", folder=tmp_path)
    assert spec.returncode == 0, spec.stderr
    assert "path" in spec.stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("connector", "spec", "postgres"), "postgres"),
        (("demo", "--for", "1"), "demo"),
    ],
)
def test_command_without_its_extra_names_it(
    tmp_path: Path, words: tuple[str, ...], extra: str
) -> None:
    result = penstock(*words, folder=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"pip install 'penstock[{extra}]'" in result.stderr


@pytest.mark.parametrize(
    ("command", "source", "extra"),
    [
        ("plan", KAFKA, "kafka"),
        ("plan", POSTGRES, "postgres"),
        ("up", POSTGRES, "spark"),
    ],
)
def test_pipeline_without_a_necessary_extra_names_it(
    tmp_path: Path, command: str, source: str, extra: str
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"location: file:./lake\nsources:\n  shop: {source}\n")
    result = penstock(command, file.name, folder=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"pip install 'penstock[{extra}]'" in result.stderr


def test_every_optional_package_has_its_declared_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {
        requirement.partition(">")[0].partition("[")[0]: extra
        for extra, requirements in project["optional-dependencies"].items()
        for requirement in requirements
        if not requirement.startswith("penstock[")
    }
    distributions = packages_distributions()
    assert {
        distributions[module][0].replace("_", "-"): extra for module, extra in EXTRAS.items()
    } == declared


def test_module_that_is_not_optional_has_no_extra() -> None:
    assert missing_extra(ModuleNotFoundError("no module", name="penstock.missing")) is None
