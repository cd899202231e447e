"""Print the documents of a resource: `python -m penstock.connectors.files FOLDER NAME`.

It needs nothing but Python, and nothing of the connectors but what is in their files,
so that it can be run by its path, too, and copied to where they are.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINES = {"staged-files": "table.jsonl", "push-files": "pushed.jsonl"}
"""Where these have a line for each document; what else is in the file has none."""


def documents(folder: Path) -> Iterator[Any]:
    """Those that are there; not what says that one is gone."""
    connector = json.loads((folder / "resource.json").read_bytes())["connector"]
    if connector == "plain-files":
        for path in sorted((folder / "keys").glob("[!.]*")):
            yield json.loads(path.read_bytes())
    elif (path := folder / LINES[connector]).exists():
        with path.open("rb") as lines:
            for line in map(json.loads, lines):
                if "document" in line and not line["deleted"]:
                    yield line["document"]


def main(arguments: list[str]) -> str:
    """What went wrong, if anything did."""
    if len(arguments) != 2:
        return "error: wants FOLDER and NAME"
    folder = Path(*arguments)
    if not (folder / "resource.json").exists():
        return f'error: there is no resource "{folder.name}" in folder "{folder.parent}"'
    for document in documents(folder):
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    return ""


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]) or 0)
