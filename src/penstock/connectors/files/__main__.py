"""Print the documents of a resource: `python -m penstock.connectors.files FOLDER NAME`.

The script imports only the standard library. It can be run by its path, and copied to another host.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINES = {"staged-files": "table.jsonl", "push-files": "pushed.jsonl"}
"""Files with one line per document, by connector. Other lines have no document."""


def documents(folder: Path) -> Iterator[Any]:
    """Yield the documents of a resource, without deleted ones."""
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
    """Print the documents, and return an error message; empty on success."""
    if len(arguments) != 2:
        return "error: the arguments must be FOLDER and NAME"
    folder = Path(*arguments)
    if not (folder / "resource.json").exists():
        return f'error: resource "{folder.name}" does not exist in folder "{folder.parent}"'
    for document in documents(folder):
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    return ""


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]) or 0)
