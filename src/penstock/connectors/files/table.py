"""A table in one file, with the transactions that are applied to it.

    {"applied": {"00000000-ffffffff": 17}}
    {"key": "02…", "deleted": false, "document": …}
    …

It is read and written whole, which makes it short; it is for small tables.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.connectors.files.atomic_files import lines_of, locked, parts_of, replace, sync
from penstock.connectors.files.folder import last_applied
from penstock.errors import Corruption
from penstock.sdk import Refused

__all__ = ["EMPTIES", "Table"]

EMPTIES: Final = b'{"empties":true}\n'
"""The first line of a staged file, if what was in the table before goes."""

NO_DOCUMENTS: Final = b'{"applied": {}}\n'


@dataclass(frozen=True, slots=True)
class Table:
    """The table in a folder."""

    folder: Path

    def create(self) -> None:
        """Create the file without documents, unless it exists."""
        if not self._file.exists():
            replace(self._file, NO_DOCUMENTS)

    def apply(self, staged: Path, key_range: str, number: int, gave_up: threading.Event) -> None:
        """Add the lines of a staged file as transaction `number` of a range, and remove it.

        That it was applied is replaced together with what it changed, and the numbers
        of a range only grow; so to apply it again is to do nothing.

        Raises:
            Corruption: it was not applied, and is not there.
            Refused: the file of the table was deleted, with all transactions before this one.
        """
        if (resource := last_applied(self.folder)) is None:
            return  # It was deleted since.
        # Shards of other ranges have the same file.
        with locked(self.folder, gave_up):
            if self._file.name in resource.missing(self.folder):
                raise Refused(
                    f'file "{self._file}" of resource "{self.folder.name}" was deleted',
                    detail="A new file would miss the documents of earlier transactions.",
                    hint="Restore the file, or name another resource.",
                )
            applied = self.applied()
            if applied.get(key_range, 0) < number:
                if not (added := lines_of(staged)):
                    raise Corruption(
                        staged.name,
                        where=str(staged.parent),
                        detail=f"It is transaction {number} of {key_range}, which is committed "
                        "and not yet applied, and its documents are not there.",
                    )
                empties = added[0] == EMPTIES
                lines = added[1:] if empties else [*self.lines(), *added]
                if not resource.delta_updates:
                    lines = [*_last_by_key(lines).values()]
                head = json.dumps({"applied": {**applied, key_range: number}}).encode() + b"\n"
                replace(self._file, head + b"".join(lines))
                sync(self.folder)
        staged.unlink(missing_ok=True)

    def applied(self) -> dict[str, int]:
        """By range, the number of the last transaction that is applied."""
        found: dict[str, int] = json.loads(self._all()[0])["applied"]
        return found

    def lines(self) -> list[bytes]:
        """What is in it, a line for each document."""
        return self._all()[1:]

    def by_key(self) -> dict[str, bytes]:
        """The documents, by their packed keys in hex."""
        return {key: parts_of(line)[1] for key, line in _last_by_key(self.lines()).items()}

    def _all(self) -> list[bytes]:
        return lines_of(self._file) or [NO_DOCUMENTS]

    @property
    def _file(self) -> Path:
        return self.folder / "table.jsonl"


def _last_by_key(lines: list[bytes]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for line in lines:
        about, _ = parts_of(line)
        if about["deleted"]:
            found.pop(about["key"], None)
        else:
            found[about["key"]] = line
    return found
