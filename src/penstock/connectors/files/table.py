"""Table in one file, with the numbers of its applied transactions.

    {"applied": {"00000000-ffffffff": 17}}
    {"key": "02…", "deleted": false, "document": …}
    …

The file is read and written completely, so it suits small tables only.
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
"""First line of a staged file that truncates the table."""

NO_DOCUMENTS: Final = b'{"applied": {}}\n'


@dataclass(frozen=True, slots=True)
class Table:
    """Table in a folder."""

    folder: Path

    def create(self) -> None:
        """Create the file without documents, unless it exists."""
        if not self._file.exists():
            replace(self._file, NO_DOCUMENTS)

    def apply(self, staged: Path, key_range: str, number: int, cancelled: threading.Event) -> None:
        """Apply a staged file as transaction `number` of a key range, and remove the file.

        The number is replaced atomically with the rows, and the numbers of a key range only grow.
        Applying the transaction again has no effect.

        Raises:
            Corruption: the transaction is not applied, and its file does not exist.
            Refused: the file of the table was deleted, with all transactions before this one.
        """
        if (resource := last_applied(self.folder)) is None:
            return  # The resource was deleted.
        # Shards of other key ranges use the same file.
        with locked(self.folder, cancelled):
            if self._file.name in resource.missing(self.folder):
                raise Refused(
                    f'file "{self._file}" of resource "{self.folder.name}" was deleted',
                    detail="A new file would miss the documents of earlier transactions.",
                    hint="Restore the file, or use another resource.",
                )
            applied = self.applied()
            if applied.get(key_range, 0) < number:
                if not (added := lines_of(staged)):
                    raise Corruption(
                        staged.name,
                        where=str(staged.parent),
                        detail=f"Transaction {number} of key range {key_range} is committed but "
                        "not applied, and its staged documents are missing.",
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
        """Return the number of the last applied transaction, by key range."""
        applied: dict[str, int] = json.loads(self._all()[0])["applied"]
        return applied

    def lines(self) -> list[bytes]:
        """Return the lines of the documents."""
        return self._all()[1:]

    def by_key(self) -> dict[str, bytes]:
        """Return the documents by packed key, in hexadecimal."""
        return {key: parts_of(line)[1] for key, line in _last_by_key(self.lines()).items()}

    def _all(self) -> list[bytes]:
        return lines_of(self._file) or [NO_DOCUMENTS]

    @property
    def _file(self) -> Path:
        return self.folder / "table.jsonl"


def _last_by_key(lines: list[bytes]) -> dict[str, bytes]:
    last: dict[str, bytes] = {}
    for line in lines:
        about, _ = parts_of(line)
        if about["deleted"]:
            last.pop(about["key"], None)
        else:
            last[about["key"]] = line
    return last
