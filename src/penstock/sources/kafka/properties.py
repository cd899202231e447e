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


_PLAIN: Final = re.compile(r"-?[0-9]{1,9}|true|false|all|none")
_SECRET: Final = re.compile(r"password|secret|token|jaas|credential|key|pem|config")


def is_harmless(name: str, value: object) -> bool:
    """Whether the value of a property may be seen: it is known, or a small number or a flag."""
    plain = _PLAIN.fullmatch(str(value).lower()) and not _SECRET.search(name.lower())
    return bool(_HARMLESS.fullmatch(name) or plain)
