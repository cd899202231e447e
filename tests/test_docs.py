"""Consistency of pages, change fragments, failpoints and requirements."""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "changes", ROOT / "tests")
    for page in folder.glob("*.md" if folder == ROOT else "**/*.md")
)
FRAGMENT = re.compile(r"[a-z0-9-]+\.(added|changed|fixed|removed|security)\.md")
RUN_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def on_spark(page: Path) -> bool:
    return any("penstock.spark" in block for _, block in blocks_to_run(page))


def blocks_to_run(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the ```python run blocks of a page, each with the line before it."""
    text = page.read_text()
    for block in re.finditer(r"^```python run\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: block.start(1)].count("\n"), block[1]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_of_a_page_resolve(page: Path):
    assert [link for link in links(page) if not resolves(page, link)] == []


def test_every_page_is_reachable_from_the_readme():
    pages = {page for page in PAGES if not FRAGMENT.fullmatch(page.name)}
    assert pages - reachable_from(ROOT / "README.md") == set()


@pytest.mark.parametrize("page", [p for p in RUN_PAGES if not on_spark(p)], ids=name_of)
def test_page_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.usefixtures("spark")  # Pages use the running session.
@pytest.mark.parametrize("page", [p for p in RUN_PAGES if on_spark(p)], ids=name_of)
def test_page_code_runs_on_spark(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def run(page: Path) -> None:
    names = {"__name__": "__main__"}
    for line, block in blocks_to_run(page):
        code = ast.increment_lineno(ast.parse(block), line)
        exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/adr").glob("0*.md")), ids=name_of)
def test_adr_has_title_status_and_four_sections(page: Path):
    number = page.name[:4]
    title, _, status, *_ = page.read_text().splitlines()
    assert title.startswith(f"# {number}. ")
    assert re.match(
        r"Status: (accepted|superseded by \d{4}), \d{4}-\d\d-\d\d\. Supersedes ", status
    )
    parts = ["Context", "Decision", "Consequences", "Alternatives"]
    assert re.findall(r"^## (.*)", page.read_text(), re.MULTILINE) == parts


def test_change_fragment_name_has_a_known_kind():
    fragments = {page.name for page in (ROOT / "changes").iterdir()} - {"README.md"}
    assert [name for name in sorted(fragments) if not FRAGMENT.fullmatch(name)] == []


def test_glossary_terms_are_unique_and_sorted():
    terms = glossary()
    assert terms == sorted(set(terms), key=str.casefold)


def test_way_of_a_row_names_functions_that_exist():
    page = (ROOT / "docs/explanation/a-row.md").read_text()
    steps = re.findall(r"`([\w/]+)\.py:([\w.]+)`", page)
    assert len(steps) > 20
    for module, function in steps:
        operator.attrgetter(function)(import_module(f"penstock.{module.replace('/', '.')}"))


def test_generated_tables_of_pages_agree_with_the_code():
    script = (sys.executable, "scripts/generate_reference.py", "--check")
    run = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_requirements_pin_every_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements} - {"penstock"}
    for file in ("requirements.txt", "requirements-dev.txt"):
        pinned = set(re.findall(r"^([\w-]+)(?:\[.*\])?==", (ROOT / file).read_text(), re.MULTILINE))
        assert declared - pinned == set()


def links(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [link for link in targets if not re.match(r"[a-z]+:", link)]


def resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def reachable_from(start: Path) -> set[Path]:
    seen, waiting = set(), [start]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page not in seen and page.exists():
            seen.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    return seen


def glossary() -> list[str]:
    page = (ROOT / "docs/reference/glossary.md").read_text()
    _, _, table = page.partition("|---|---|\n")
    return [row.split(" | ")[0].strip("| ") for row in table.splitlines()]
