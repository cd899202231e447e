"""Which properties of Kafka's clients may be seen: those that we know to hold no secret.

There are several hundred, in two clients, and others come with classes of the user's own. So
one that is not known to be harmless is taken for a secret, wherever it is written or told.
"""

import re
from typing import Final

__all__ = ["is_harmless"]

_HARMLESS: Final = re.compile(
    r"""(?x) client\.(id|rack|dns\.lookup) | sasl\.username | log_level | debug
    | .*\.(ms|seconds|bytes|kbytes|records|messages|count|size|max|min|factor|window)
    | .*\.(enable|enabled|verification|crcs|family|jitter|algorithm|type|protocols?|mechanisms?)
    | .*\.(location|class|provider|suites|level|policy|strategy|service\.name|principal)"""
)


def is_harmless(name: str) -> bool:
    """Whether the value of a property may be seen."""
    return _HARMLESS.fullmatch(name) is not None
