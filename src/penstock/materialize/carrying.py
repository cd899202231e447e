"""Transport of Penstock errors from Spark tasks to the driver.

Spark reports an exception of a worker as text only. A Spark task at the end of a job returns
its error in the result. A Spark task whose rows feed another stage has no such result, so its
error is pickled into the text of the exception.
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
    """Raise a `PenstockError` of the block in a form that `as_carried` decodes.

    Use it within a Spark task.
    """
    try:
        yield
    except PenstockError as error:
        text = base64.b64encode(pickle.dumps(error)).decode()
        raise RuntimeError(f"penstock error <{text}>") from error


@contextmanager
def as_carried() -> Iterator[None]:
    """Raise the `PenstockError` of a Spark task instead of Spark's own exception.

    Use it in the driver, around the job.
    """
    try:
        yield
    except Exception as raised:
        if (found := _CARRIED.search(str(raised))) is None:
            raise
        error = pickle.loads(base64.b64decode(found[1]))
        if not isinstance(error, PenstockError):
            raise
        raise error from None
