"""What an object may be called.

A key is made of words of `[A-Za-z0-9._=-]` joined by `/`, none of which begins
with a dot. That is what every store takes as it is: no escaping, no case
trouble, no way out of a folder. Names with a dot are left to the system, which
puts `.DS_Store` or `.nfs0001` where it likes.
`tmp/` is left to stores, for what is not finished, and no key is a folder of
another, since in a folder of files `a` cannot be both.
"""

import re
from typing import Final

from penstock.errors import UsageError

__all__ = ["UNFINISHED", "checked_key", "checked_prefix", "word_of_a_key"]

UNFINISHED: Final = "tmp"

_WORD: Final = r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*"
_KEY: Final = re.compile(rf"(?!tmp(?:/|\Z)){_WORD}(?:/{_WORD})*")
_PREFIX: Final = re.compile(rf"(?:{_WORD}/)*[A-Za-z0-9._=-]*")
_ONE_WORD: Final = re.compile(_WORD)


def checked_key(key: str) -> str:
    """`key` itself, if an object may be called so."""
    if _KEY.fullmatch(key) is None:
        raise UsageError(
            f'object key "{key}" is malformed',
            detail='No key begins with the word "tmp", and no word of one with a dot.',
            hint="Join words of letters, digits, dot, underscore, equals sign and hyphen with /.",
        )
    return key


def checked_prefix(prefix: str) -> str:
    """`prefix` itself, if some key may begin so. Every key begins with the empty one."""
    if _PREFIX.fullmatch(prefix) is None:
        raise UsageError(
            f'key prefix "{prefix}" is malformed',
            hint="Give the beginning of a key, such as log/ or log/0001.",
        )
    return prefix


def word_of_a_key(word: str) -> bool:
    """Whether `word` may stand between the slashes of a key."""
    return _ONE_WORD.fullmatch(word) is not None
