from penstock.durable import Log
from penstock.durable.log import entry_key, entry_number
from penstock.durable.memory import MemoryBlob

FOREIGN = (
    *("log/notes", "log/00000000000000000/003.bak", "log/00000000000000000/nfs0001", "log/zzz"),
    *("mark/floor-x", "mark/floor-7", "mark/head-00000000000000000009.bak", "mark/notes"),
)


def test_entry_number_of_foreign_key_is_none() -> None:
    assert entry_number(entry_key(1_234_567)) == 1_234_567
    assert [entry_number(key) for key in FOREIGN] == [None] * len(FOREIGN)


def test_log_ignores_and_keeps_foreign_keys() -> None:
    blob = MemoryBlob()
    for key in FOREIGN:
        blob.put(key, b"")
    log = Log(blob)
    for number in range(5):
        assert log.create(number, b"")
    log.nothing_beyond(5)
    log.witness(5)
    log.truncate(4, head=5)
    log.witness(6)
    log.sweep()
    assert log.entries() == [4]
    assert log.written_ms(3) is None
    assert (log.marks().floor, log.marks().head) == (4, 6)
    assert {listed.key for listed in blob.list("")} >= set(FOREIGN)
