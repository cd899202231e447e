"""Scenarios: a connector pattern, a fault at a message, and a bug that must be detected.

Guarantees of the patterns:

    sqlite, postgres   the endpoint is authoritative. Exactly once; with one shard all
                       resources are always as of one tick. With several, each key range
                       is, and a transfer between two ranges may be seen partially.
    staged-files       the recovery log is authoritative, with idempotent apply. Exactly
                       once; a resource is always complete, but two resources may be one
                       transaction apart until it is acknowledged.
    plain-files        the recovery log is authoritative, without transactions. A partial
                       transaction is visible until it is finished; no value is replaced by
                       an older one. Sums may count a transaction twice.
    push-files         push-only. At least once: correct after deduplication of lines.

No connector counts documents in its own checkpoint, so the two `counter-*` scenarios of the
vectors do not apply.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final

from penstock.protocol.messages import Kind
from tests.chaos.shim import Action, Fault

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
    """One scenario; it runs clean, and with its bug."""

    connector: str
    defect: str
    """Bug that must be detected."""

    fault: Fault | None = None
    rows: tuple[int, ...] = ()
    """Rows of the table of invariants."""

    shards: int = 1
    title: str = ""
    steps: int = 3
    """Number of steps after the first."""

    spread: bool = False
    """Streams alternate between two connectors."""

    moving: bool = False
    """Tasks alternate between two workers."""

    idle: bool = False
    """The fault is in the last transaction, without later changes."""

    compacts: bool = False
    """Collections are compacted as far as possible while no runtime runs."""

    late_binding: bool = False
    """One of the bindings is added after half of the steps."""

    restarts: bool = False
    """The runtime is restarted after half of the steps."""

    then_shards: tuple[int, ...] = ()
    """Numbers of shards after each step, or after a crash."""

    whole: bool = False
    """All shards must be as of one tick, which is not guaranteed."""

    cut_off: bool = False
    """The endpoint is locked or unreachable during a step."""

    expects: tuple[str, ...] = field(default=())
    """Checks of which at least one must report the bug; empty: any."""

    @property
    def action(self) -> str:
        """Return the fault as text, for statistics."""
        if self.fault is not None:
            return f"{self.fault.action} at {self.fault.at}"
        return "endpoint away" if self.cut_off else "no fault"

    def is_detected_by(self, violations: Set[str]) -> bool:
        """Return whether the violations report the bug; missing progress is not sufficient."""
        return bool(
            violations & set(self.expects) if self.expects else violations - {"progress", "shim"}
        )

    def __str__(self) -> str:
        if self.title:
            return f"{self.connector}-{self.title}"
        assert self.fault is not None
        return f"{self.connector} {self.fault.action} at {self.fault.at}".replace(" ", "-")


OWN: Final = {
    ("sqlite", Kind.STARTED_COMMIT): "equality_only",
    ("postgres", Kind.STARTED_COMMIT): "equality_only",
    ("staged-files", Kind.ACKNOWLEDGE): "forget_state",
    ("plain-files", Kind.STARTED_COMMIT): "unplanned",
}
"""Bugs that such a crash detects; by default, documents are dropped."""

IN_TASKS: Final = ("equality_only", "forget_state")
"""Bugs in Spark tasks, which cannot be planted in processes of Spark."""


def crash(connector: str, action: Action, at: Kind, *, on_spark: bool = False) -> Scenario:
    """Return a scenario with a crash, or a cut, at a message."""
    defect = OWN.get((connector, at), "drop_documents")
    if on_spark and defect in IN_TASKS:
        defect = "drop_documents"
    restarts = at in (Kind.OPEN, Kind.OPENED)
    # Two steps may be one commit, and there is one restart.
    fault = Fault(action, at, after_commits=1) if restarts else Fault(action, at)
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
"""Scenarios of the vectors, by name."""

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
"""Scenarios of the invariants and hazards."""

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
"""Scenarios with executors in separate processes."""

CRASHES: Final[tuple[Action, ...]] = ("crash connector", "crash runtime", "cut")
KILLS: Final[tuple[Action, ...]] = ("crash executor", "crash runtime")

LONG: Final = (
    *SHORT,
    *(
        crash(connector, action, at)
        for connector in CONNECTORS
        for action in CRASHES
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
"""All scenarios without Spark, for a long run."""

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
        crash(connector, action, at, on_spark=True)
        for connector in CONNECTORS
        for action in KILLS
        for at in (Kind.STORE, Kind.START_COMMIT, Kind.STARTED_COMMIT, Kind.ACKNOWLEDGE)
    ),
    crash("sqlite", "crash executor", Kind.OPEN, on_spark=True),
    crash("sqlite", "crash executor", Kind.LOAD, on_spark=True),
)
"""All scenarios on Spark, for a long run."""
