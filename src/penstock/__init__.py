"""Penstock moves changing data from where it is made to where it is used, exactly once.

The front doors are `penstock.persist.open` for one storage location and the
command line. Import the room you need; this file imports none of them.
"""

__all__ = ["DOCUMENTATION_URL", "__version__"]

__version__ = "0.1.0"

DOCUMENTATION_URL = "https://penstock.example/docs/"
"""Address of the pages of `docs/`; the project's URL in pyproject.toml is the same."""
