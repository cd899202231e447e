"""Kafka client properties whose values may be displayed.

The two clients have several hundred properties, and user-provided classes add more. A property that
is not known to be harmless is therefore treated as a secret in every file and message.
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
    """Return whether the value may be displayed: a known property, a small number or a flag."""
    plain = _PLAIN.fullmatch(str(value).lower()) and not _SECRET.search(name.lower())
    return bool(_HARMLESS.fullmatch(name) or plain)
