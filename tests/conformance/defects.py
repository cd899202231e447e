"""Planted defects of a connector, at least one per check.

A defect names the check that must find it, the pattern, and a part of the expected
failure reason. The timeout is shorter for a defect that makes the connector hang.
"""

from dataclasses import dataclass

REMOTE = "remote-authoritative"
STAGED = "idempotent-apply"
WRITTEN = "non-transactional"
PUSHED = "push-only"


@dataclass(frozen=True)
class Defect:
    name: str
    check: str
    says: str
    pattern: str = REMOTE
    hangs: bool = False
    process: bool = False
    """Set for the process: the check sends no endpoint config that could name the defect."""

    def __str__(self) -> str:
        return f"{self.name}-{self.pattern}" if self.pattern != REMOTE else self.name


DEFECTS = (
    Defect("no-schema", "spec-has-schemas", "not a JSON object", process=True),
    Defect("validates-backwards", "validate-answers-every-binding", "order of the bindings"),
    Defect("answers-at-random", "validate-is-deterministic", "another the second time"),
    Defect("hides-deletes", "validate-announces-deletes", "accepts_delete is False"),
    Defect("takes-any-endpoint", "validate-refuses-bad-endpoint", "without path was not refused"),
    Defect("takes-any-resource", "validate-refuses-bad-resource", "without table was not refused"),
    Defect("binds-twice", "duplicate-resource-refused", "was not refused"),
    Defect("dry-run-applies", "apply-dry-run-touches-nothing", "something else to do"),
    Defect("dry-run-deletes", "apply-dry-run-touches-nothing", "not applied"),
    Defect("apply-empties", "apply-twice-is-once", "is missing"),
    Defect("delete-keeps-rows", "apply-delete-takes-away", "can be loaded after it"),
    Defect("delete-keeps-checkpoint", "apply-delete-takes-away", "Opened has checkpoint"),
    Defect("adding-empties", "apply-adds-a-field", "is missing"),
    Defect("removing-empties", "apply-removes-a-field", "is missing"),
    Defect("dislikes-odd-fields", "apply-takes-odd-field-names", "odd name"),
    Defect("dislikes-odd-tasks", "apply-refuses-nothing-it-validated", "odd name"),
    Defect("acknowledges-first", "open-answers-opened", "Acknowledged"),
    Defect("opens-again", "opened-comes-once", "Opened"),
    Defect("no-first-acknowledge", "first-acknowledge", "did not come", hangs=True),
    Defect("fails-at-the-end", "end-of-stream-when-idle", "the stream ended"),
    Defect("skips-empty-commits", "empty-transaction", "Opened has checkpoint"),
    Defect("flush-needs-loads", "flush-is-answered-without-loads", "did not come", hangs=True),
    Defect("commits-only-once", "several-transactions", "and must be"),
    Defect("answers-the-last-load", "legal-orders", "and must be"),
    Defect("checkpoint-is-text", "open-returns-the-last-checkpoint", "Opened has checkpoint"),
    Defect("loads-too-early", "no-loaded-before-acknowledged", "Loaded"),
    Defect("leaves-out-nulls", "load-returns-what-was-stored", "and must be"),
    Defect("null-for-missing", "load-missing-key-omitted", "no JSON object"),
    Defect("flushes-early", "flushed-after-last-loaded", "300 of 600"),
    Defect("loads-while-committing", "pipelined-loads-see-the-commit", "older"),
    Defect("writes-through", "load-sees-only-what-is-committed", "no transaction has committed"),
    Defect("mixes-bindings", "several-bindings", "of 1 in 1"),
    Defect("first-key-field-only", "several-key-fields", "twice"),
    Defect("keeps-the-first", "update-overwrites", "older"),
    Defect("drops-deletes", "deletes-remove", "was removed, and is there"),
    Defect("delete-must-exist", "delete-of-a-missing-key", "is not there"),
    Defect("trusts-exists", "exists-is-a-hint", "newer"),
    Defect("takes-a-key-twice", "duplicate-key-refused", "in one Store"),
    Defect("looks-within-a-store", "duplicate-key-refused", "in two Stores"),
    Defect("takes-a-key-twice", "duplicate-key-refused", "in one Store", WRITTEN),
    Defect("forgets-after-many", "many-documents", "is missing"),
    Defect("forgets-after-many", "many-documents", "is without", PUSHED),
    Defect("takes-slices-in-order", "slices-in-any-order", "key"),
    Defect("refuses-large", "large-document", "too large"),
    Defect("ascii-only", "odd-values", "which no Load asked for"),
    Defect("numbers-are-doubles", "odd-numbers", "which no Load asked for"),
    Defect("cuts-at-nul", "nul-is-kept-or-refused", "which no Load asked for"),
    Defect("empties-nothing", "empties-remove-all", "was removed, and is there", WRITTEN),
    Defect("empties-at-once", "empties-remove-all", "is missing"),
    Defect("empties-anytime", "empties-first-and-all", "after another, was not refused"),
    Defect("delta-keeps-all", "delta-binding-is-emptied", "must have it 0 times"),
    Defect("ignores-delta", "delta-binding-appends", "is without"),
    Defect("ignores-delta", "delta-binding-appends", "is without", PUSHED),
    Defect("delta-needs-no-flush", "delta-binding-flushes", "did not come", hangs=True),
    Defect("commits-on-cancel", "cancelled-stream-is-rolled-back", "broken off"),
    Defect("keeps-loads", "cancelled-load-is-forgotten", "which no Load asked for"),
    Defect("keeps-the-lock", "cancel-releases-at-once", "Opened did not come", hangs=True),
    Defect("lets-both-live", "second-open-ends-the-first", "came to Acknowledged", STAGED),
    Defect("lets-both-live", "second-open-ends-the-first", "came to Acknowledged", PUSHED),
    Defect("waits-for-the-older", "second-open-ends-a-store", "Opened did not come", hangs=True),
    Defect("fences-equal-ranges", "fence-overlap", "came to Acknowledged", STAGED),
    Defect("fences-everyone", "fence-disjoint-ranges", "taken over"),
    Defect("fences-other-tasks", "fence-other-materialization-untouched", "taken over"),
    Defect("inherits-nothing", "fence-split", "Opened has checkpoint"),
    Defect("fences-equal-ranges", "fence-split", "came to Acknowledged", WRITTEN),
    Defect("inherits-from-the-widest", "fence-split-twice", "Opened has checkpoint"),
    Defect("resurrects", "fence-join", "Those of before were"),
    Defect("joins-two", "fence-join-of-four", "Those of before were"),
    Defect("forgets-the-fence", "zombie-cannot-commit", "came to Acknowledged"),
    Defect("locks-in-store", "zombie-in-store-holds-nothing", "did not come", hangs=True),
    Defect("applies-all-staged", "zombie-stages-in-vain", "of the zombie", STAGED),
    Defect("older-overwrites", "older-never-overwrites-newer", "of the older", WRITTEN),
    Defect("forgets-on-open", "restart-after-open", "is missing"),
    Defect("load-removes", "restart-after-load", "is missing"),
    Defect("flush-removes", "restart-after-flush", "is missing"),
    Defect("writes-through", "restart-after-store", "newer"),
    Defect("checkpoint-apart", "restart-after-start-commit", "newer"),
    Defect("stages-in-memory", "restart-after-started-commit", "newer", STAGED),
    Defect("acknowledges-before-commit", "restart-after-acknowledge", "Opened has checkpoint"),
    Defect("checkpoint-in-memory", "checkpoint-survives-restart", "Opened has checkpoint"),
    Defect(
        "first-acknowledge-applies-nothing",
        "staged-work-applied-on-first-acknowledge",
        "newer",
        STAGED,
    ),
    Defect("applies-twice", "staged-work-applied-once", "4 times", STAGED),
    *(
        Defect(
            f"bears-{name}", f"malformed-{name}", "was not refused", process=not name.find("first")
        )
        for name in (
            "empty-request",
            "garbage",
            "two-fields",
            "first-is-not-open",
            "open-without-version",
            "open-backwards",
            "second-open",
            "flush-before-acknowledge",
            "acknowledge-twice",
            "store-before-flush",
            "start-commit-before-flush",
            "start-commit-without-checkpoint",
            "load-after-flush",
            "load-without-keys",
            "load-outside-arena",
            "load-slice-backwards",
            "load-unknown-binding",
            "store-unequal-lists",
            "store-without-exists",
            "store-nothing",
            "store-outside-arena",
            "store-unequal-deletes",
            "store-unknown-binding",
            "end-after-load",
            "end-after-store",
        )
    ),
    *(
        Defect("answers-about-none", check, "Validated has 0 bindings")
        for check in (
            "validate-answers-every-binding",
            "validate-announces-deletes",
            "apply-refuses-nothing-it-validated",
        )
    ),
)
