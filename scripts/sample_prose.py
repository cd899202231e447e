"""Print docstrings, error messages and test names, selected at random by a seed.

    python scripts/sample_prose.py --seed 7 [--count 10]

A reader judges whether they are understood at first reading, without the code.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a sample of the project's prose.")
    parser.add_argument("--seed", type=int, default=1, help="Select the sample by this seed.")
    parser.add_argument("--count", type=int, default=10, help="Print this many of each kind.")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for title, texts in (
        ("Docstrings", sorted(docstrings())),
        ("Errors", sorted(errors())),
        ("Test names", sorted(test_names())),
    ):
        print(f"{title}, {options.count} of {len(texts)}:")
        for text in rng.sample(texts, options.count):
            print(f"    {text}")


def modules(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if "_generated" not in path.parts:
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def docstrings() -> Iterator[str]:
    for path, tree in modules("src"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                doc := ast.get_docstring(node)
            ):
                yield f"{path}: {node.name}: {doc.splitlines()[0]}"


def errors() -> Iterator[str]:
    for path, tree in modules("src"):
        for node in ast.walk(tree):
            match node:
                case ast.Raise(exc=ast.Call(args=[message, *_])) if text := to_text(message):
                    yield f"{path}:{node.lineno}: {text}"


def to_text(message: ast.expr) -> str:
    """Return a message with its expressions in braces; empty if it is not a literal."""
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in parts
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
    return ""


def test_names() -> Iterator[str]:
    for path, tree in modules("tests"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path}: {node.name}"


if __name__ == "__main__":
    main()
