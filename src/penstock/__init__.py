"""Penstock moves changing data from where it is made to where it is used, exactly once.

The front doors are `penstock.persist.open` for one storage location and the
command line. Import the room you need; this file imports none of them.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
