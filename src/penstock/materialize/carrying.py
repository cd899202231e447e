"""Errors of ours through Spark, which brings what a worker raises as text.

A task that ends a job by an error of ours says so in its result. One whose rows go on to
another task cannot, so the error travels in the text, whole.
"""

import base64
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.errors import PenstockError

__all__ = ["as_carried", "carrying_errors"]

_CARRIED: Final = re.compile(r"penstock error <([A-Za-z0-9+/=]+)>")


@contextmanager
def carrying_errors() -> Iterator[None]:
    """Within a task: let an error of ours be found by the driver."""
    try:
        yield
    except PenstockError as error:
        text = base64.b64encode(pickle.dumps(error)).decode()
        raise RuntimeError(f"penstock error <{text}>") from error


@contextmanager
def as_carried() -> Iterator[None]:
    """In the driver: raise what a task carried, rather than what Spark says of it."""
    try:
        yield
    except Exception as raised:
        if (found := _CARRIED.search(str(raised))) is None:
            raise
        error = pickle.loads(base64.b64decode(found[1]))
        if not isinstance(error, PenstockError):
            raise
        raise error from None
