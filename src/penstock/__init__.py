"""Penstock moves changing data from where it is made to where it is used, exactly once.

The front doors are `penstock.persist.open` for one storage location and the
command line. Import the room you need; this file imports none of them.
"""

from pathlib import Path

__all__ = ["__version__", "documentation_url"]

__version__ = "0.1.0"


def documentation_url(page: str) -> str:
    """Return the `file:` URL of a page of `docs/`, which may name a section: `page.md#section`.

    The wheel contains the pages; a checkout has them next to `src`.
    """
    packaged = Path(__file__).parent / "docs"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[2] / "docs"
    return f"{folder.resolve().as_uri()}/{page}"
