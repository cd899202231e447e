"""Every scenario: a pattern, a fault at a step, and a bug that it must bring to light.

What a pattern promises, and what is therefore not asked of it:

    sqlite, postgres   the endpoint is authoritative. Exactly once; with one shard all
                       resources are as of one tick at every moment. With several, each
                       range is, and a transfer between two of them may be seen half done.
    staged-files       the recovery log is, and what is staged is applied idempotently.
                       Exactly once; a resource is whole at every moment, but two of them
                       may be a transaction apart until it is acknowledged.
    plain-files        the recovery log is, and the store has no transactions. A torn
                       transaction is seen until it is finished; nothing goes back in time,
                       and at rest it is right. Sums may count twice what was stored twice.
    push-files         push-only. At least once: without the lines that are there twice
                       it is as good as the others.

A connector that counts documents in its own checkpoint there is none, so the two
`counter-*` scenarios of that class have nothing to run on.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final

from penstock.protocol.messages import Kind
from tests.chaos.shim import Deed, Fault

TRANSACTIONAL: Final = ("sqlite", "postgres")
CONNECTORS: Final = (*TRANSACTIONAL, "staged-files", "plain-files", "push-files")

EVERY: Final = (
    Kind.OPEN,
    Kind.OPENED,
    Kind.LOAD,
    Kind.LOADED,
    Kind.FLUSH,
    Kind.FLUSHED,
    Kind.STORE,
    Kind.START_COMMIT,
    Kind.STARTED_COMMIT,
    Kind.ACKNOWLEDGE,
    Kind.ACKNOWLEDGED,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One story; it is told clean, and with its bug."""

    connector: str
    defect: str
    """Which bug must be found."""

    fault: Fault | None = None
    rows: tuple[int, ...] = ()
    """Of the table of invariants."""

    shards: int = 1
    title: str = ""
    steps: int = 3
    """After the first."""

    spread: bool = False
    """Whether streams go to two connectors in turn."""

    moving: bool = False
    """Whether tasks go to two workers in turn."""

    idle: bool = False
    """Whether nothing comes after the last transaction, and that is the one to be harmed."""

    compacts: bool = False
    """Whether the collections are compacted as far as they may be, while nothing runs."""

    late_binding: bool = False
    """Whether one of the bindings is added on the way."""

    restarts: bool = False
    """Whether the runtime is stopped and started on the way."""

    then_shards: tuple[int, ...] = ()
    """How many shards there are after each step, as long as it is told; or after a crash."""

    whole: bool = False
    """Whether all shards are held to one tick, which they do not promise."""

    cut_off: bool = False
    """Whether the endpoint is locked, or cannot be reached, for a while."""

    expects: tuple[str, ...] = field(default=())
    """Of these at least one must be broken by the bug; none: any."""

    @property
    def deed(self) -> str:
        """What is done, for a count."""
        if self.fault is not None:
            return f"{self.fault.deed} at {self.fault.at}"
        return "endpoint away" if self.cut_off else "no fault"

    def is_found_by(self, broken: Set[str]) -> bool:
        """Whether what is broken is what the bug would break; to stand still is not enough."""
        return bool(broken & set(self.expects) if self.expects else broken - {"progress", "shim"})

    def __str__(self) -> str:
        if self.title:
            return f"{self.connector}-{self.title}"
        assert self.fault is not None
        return f"{self.connector} {self.fault.deed} at {self.fault.at}".replace(" ", "-")


OWN: Final = {
    ("sqlite", Kind.STARTED_COMMIT): "equality_only",
    ("postgres", Kind.STARTED_COMMIT): "equality_only",
    ("staged-files", Kind.ACKNOWLEDGE): "forget_state",
    ("plain-files", Kind.STARTED_COMMIT): "unplanned",
}
"""The bugs that such a crash brings to light; where there is none, documents are dropped."""

IN_TASKS: Final = ("equality_only", "forget_state")
"""Bugs of what runs in tasks, which cannot be planted in processes of Spark."""


def crash(connector: str, deed: Deed, at: Kind, *, on_spark: bool = False) -> Scenario:
    """A crash, or a cut, at a message."""
    defect = OWN.get((connector, at), "drop_documents")
    if on_spark and defect in IN_TASKS:
        defect = "drop_documents"
    restarts = at in (Kind.OPEN, Kind.OPENED)
    # Two steps may be one commit, and there is one restart.
    fault = Fault(deed, at, after_commits=1) if restarts else Fault(deed, at)
    return Scenario(connector, defect, fault, restarts=restarts)


VECTORS: Final = {
    "replayed-acknowledge": Scenario(
        "staged-files",
        "apply_twice",
        Fault("replay", Kind.ACKNOWLEDGED, nth=1, after_commits=4, times=3),
        title="replayed-acknowledge",
        steps=5,
        expects=("no-duplicates",),
    ),
    "crash-at-flush": Scenario(
        "sqlite",
        "drop_documents",
        Fault("crash connector", Kind.FLUSH, nth=4, after_commits=0),
        title="crash-at-flush",
        steps=5,
    ),
    "at-least-once-never-loses": Scenario(
        "push-files",
        "drop_documents",
        Fault("crash connector", Kind.STARTED_COMMIT, nth=4, after_commits=0),
        title="at-least-once-never-loses",
        steps=5,
        expects=("no-loss",),
    ),
    "join-after-split": Scenario(
        "sqlite",
        "ignore_key_range",
        then_shards=(2, 4, 2, 1),
        steps=4,
        title="join-after-split",
        rows=(24,),
    ),
}
"""Those of the vectors, by the names they have there."""

ROWS: Final = (
    Scenario(
        "sqlite", "truncate_in_apply", rows=(18,), restarts=True, title="whole-at-every-commit"
    ),
    Scenario(
        "sqlite",
        "equality_only",
        Fault("crash runtime", Kind.START_COMMIT, after_commits=4, shard=1, behind=True),
        shards=2,
        rows=(19,),
        title="crash-between-the-commits-of-shards",
    ),
    Scenario(
        "sqlite",
        "ignore_key_range",
        shards=3,
        then_shards=(2, 3, 1),
        rows=(24,),
        title="three-two-three-one-shards",
    ),
    Scenario(
        "sqlite",
        "equality_only",
        Fault("crash runtime", Kind.START_COMMIT, after_commits=6, shard=1, behind=True),
        shards=3,
        then_shards=(2,),
        rows=(24,),
        title="three-to-two-shards-while-unequal",
    ),
    Scenario(
        "plain-files",
        "unplanned",
        Fault("crash runtime", Kind.STARTED_COMMIT),
        rows=(20,),
        title="insert-crash-delete",
        expects=("no-ghosts",),
    ),
    Scenario(
        "staged-files",
        "any_session",
        rows=(21,),
        spread=True,
        moving=True,
        title="a-shard-that-moves",
        steps=4,
    ),
    Scenario(
        "plain-files",
        "unconditional_write",
        Fault("zombie", Kind.STORE),
        rows=(22,),
        title="zombie-at-store",
        steps=4,
        expects=("never-back", "no-ghosts"),
    ),
    Scenario(
        "sqlite",
        "unfenced_commit",
        Fault("zombie", Kind.START_COMMIT),
        rows=(22,),
        title="zombie-at-start-commit",
        steps=4,
    ),
    Scenario(
        "staged-files",
        "apply_twice",
        Fault("zombie", Kind.ACKNOWLEDGE, after_commits=3),
        rows=(21,),
        title="zombie-at-acknowledge",
        steps=4,
        expects=("no-duplicates",),
    ),
    *(
        Scenario(
            "sqlite",
            "no_bindings",
            Fault("crash runtime", at, after_commits=3),
            rows=(23,),
            late_binding=True,
            title=f"binding-added-then-crash-at-{at}",
            expects=("no-loss",),
        )
        for at in (Kind.STORE, Kind.STARTED_COMMIT)
    ),
    Scenario(
        "staged-files",
        "acknowledge_late",
        rows=(26,),
        title="idle-after-the-last",
        expects=("applied-when-idle",),
    ),
    Scenario(
        "staged-files",
        "forget_state",
        Fault("crash connector", Kind.ACKNOWLEDGE, after_commits=4),
        rows=(26,),
        idle=True,
        title="idle-after-a-crash-at-acknowledge",
    ),
    Scenario(
        "staged-files",
        "hold_at_upper",
        Fault("crash runtime", Kind.START_COMMIT, after_commits=3),
        compacts=True,
        title="compacted-between-crash-and-restart",
        expects=("progress",),
    ),
    Scenario(
        "sqlite",
        "ignore_key_range",
        Fault("crash connector", Kind.STARTED_COMMIT, after_commits=4, shard=0),
        shards=2,
        title="two-shards-crash",
    ),
    Scenario(
        "sqlite", "drop_documents", Fault("stall", Kind.START_COMMIT), title="stall-at-start-commit"
    ),
    *(
        Scenario(each, "drop_documents", cut_off=True, title="endpoint-away")
        for each in ("sqlite", "postgres", "staged-files")
    ),
)
"""Those of the table of invariants, and of the hazards."""

SHORT: Final = (
    *VECTORS.values(),
    *ROWS,
    crash("sqlite", "crash connector", Kind.STARTED_COMMIT),
    crash("postgres", "crash connector", Kind.STARTED_COMMIT),
    crash("staged-files", "crash connector", Kind.STARTED_COMMIT),
    crash("staged-files", "crash runtime", Kind.ACKNOWLEDGE),
    crash("plain-files", "crash connector", Kind.STORE),
    crash("push-files", "crash runtime", Kind.ACKNOWLEDGE),
)

ON_SPARK: Final = (
    Scenario(
        "sqlite",
        "drop_documents",
        Fault("crash executor", Kind.STARTED_COMMIT, after_commits=3, shard=1),
        shards=2,
        title="executors-killed-at-the-commit-of-one-shard",
    ),
    Scenario(
        "staged-files",
        "apply_twice",
        Fault("crash executor", Kind.ACKNOWLEDGED),
        title="executors-killed-at-acknowledged",
        expects=("no-duplicates",),
    ),
    Scenario(
        "plain-files",
        "unplanned",
        Fault("crash runtime", Kind.STARTED_COMMIT),
        title="driver-killed-in-a-transaction",
        expects=("no-ghosts",),
    ),
)
"""Where tasks are processes of their own."""

CRASHES: Final[tuple[Deed, ...]] = ("crash connector", "crash runtime", "cut")
KILLS: Final[tuple[Deed, ...]] = ("crash executor", "crash runtime")

LONG: Final = (
    *SHORT,
    *(
        crash(connector, deed, at)
        for connector in CONNECTORS
        for deed in CRASHES
        for at in EVERY
        if connector != "push-files" or at not in (Kind.LOAD, Kind.LOADED)
    ),
    *(crash(connector, "stall", at) for connector in CONNECTORS for at in EVERY[4:]),
    *(
        Scenario(connector, defect, Fault("zombie", at), steps=4)
        for connector, at, defect in (
            ("sqlite", Kind.STORE, "unfenced_commit"),
            ("sqlite", Kind.START_COMMIT, "unfenced_commit"),
            ("postgres", Kind.STORE, "drop_documents"),
            ("postgres", Kind.START_COMMIT, "drop_documents"),
            ("staged-files", Kind.STORE, "apply_twice"),
            ("staged-files", Kind.START_COMMIT, "apply_twice"),
            ("plain-files", Kind.STORE, "unconditional_write"),
            # The zombie's documents are written before its successor's, which replace them.
            ("plain-files", Kind.START_COMMIT, "drop_documents"),
            ("push-files", Kind.STORE, "drop_documents"),
            ("push-files", Kind.START_COMMIT, "drop_documents"),
        )
    ),
)
"""The whole table, for a long run."""

LONG_ON_SPARK: Final = (
    *ON_SPARK,
    Scenario(
        "sqlite",
        "drop_documents",
        Fault("crash executor", Kind.STORE, after_commits=3),
        shards=3,
        title="executors-killed-with-as-many-shards-as-slots",
    ),
    *(
        crash(connector, deed, at, on_spark=True)
        for connector in CONNECTORS
        for deed in KILLS
        for at in (Kind.STORE, Kind.START_COMMIT, Kind.STARTED_COMMIT, Kind.ACKNOWLEDGE)
    ),
    crash("sqlite", "crash executor", Kind.OPEN, on_spark=True),
    crash("sqlite", "crash executor", Kind.LOAD, on_spark=True),
)
"""And with tasks that are processes of their own."""
