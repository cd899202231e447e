"""Object keys.

A key consists of words of `[A-Za-z0-9._=-]`, joined by `/`. No word begins with a dot. Every store
accepts such keys without escaping, and they cannot leave a folder. Names with a leading dot, such
as `.DS_Store` or `.nfs0001`, belong to the operating system. Stores use `tmp/` for temporary files.
No key is a folder of another key, because a file cannot be a folder too.
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
    """Return `key` if it is valid."""
    if _KEY.fullmatch(key) is None:
        raise UsageError(
            f'object key "{key}" is malformed',
            detail='The first word of a key is not "tmp", and no word begins with a dot.',
            hint="Join words of letters, digits, dot, underscore, equals sign and hyphen with /.",
        )
    return key


def checked_prefix(prefix: str) -> str:
    """Return `prefix` if it is the beginning of a valid key. The prefix may be empty."""
    if _PREFIX.fullmatch(prefix) is None:
        raise UsageError(
            f'key prefix "{prefix}" is malformed',
            hint="Give the beginning of a key, such as log/ or log/0001.",
        )
    return prefix


def word_of_a_key(word: str) -> bool:
    """Return whether `word` is a valid word of a key."""
    return _ONE_WORD.fullmatch(word) is not None
