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
    Defect("no-schema", "spec-returns-json-schemas", "not a JSON object", process=True),
    Defect(
        "validates-backwards", "validate-returns-all-bindings-in-order", "order of the bindings"
    ),
    Defect("answers-at-random", "validate-twice-returns-same-response", "differ"),
    Defect("hides-deletes", "validate-reports-accepts-delete", "accepts_delete is False"),
    Defect(
        "takes-any-endpoint",
        "validate-with-invalid-endpoint-is-rejected",
        "without path was not rejected",
    ),
    Defect(
        "takes-any-resource",
        "validate-with-invalid-resource-is-rejected",
        "without table was not rejected",
    ),
    Defect("binds-twice", "resource-bound-twice-is-rejected", "was not rejected"),
    Defect("dry-run-applies", "apply-dry-run-changes-nothing", "two dry runs and of Apply differ"),
    Defect("dry-run-deletes", "apply-dry-run-changes-nothing", "not applied"),
    Defect("apply-empties", "apply-twice-changes-nothing", "is missing"),
    Defect(
        "delete-keeps-rows", "apply-delete-removes-data-and-checkpoint", "can be loaded after it"
    ),
    Defect(
        "delete-keeps-checkpoint",
        "apply-delete-removes-data-and-checkpoint",
        "Opened has checkpoint",
    ),
    Defect("adding-empties", "apply-with-added-field-keeps-documents", "is missing"),
    Defect("removing-empties", "apply-with-removed-field-keeps-documents", "is missing"),
    Defect("dislikes-odd-fields", "apply-accepts-unusual-field-names", "odd name"),
    Defect("dislikes-odd-tasks", "apply-accepts-validated-bindings", "odd name"),
    Defect("acknowledges-first", "open-returns-opened-first", "Acknowledged"),
    Defect("opens-again", "stream-has-one-opened", "Opened"),
    Defect("no-first-acknowledge", "first-transaction-is-acknowledged", "within", hangs=True),
    Defect("fails-at-the-end", "end-of-idle-stream-is-no-error", "the stream ended"),
    Defect("skips-empty-commits", "empty-transaction-commits-checkpoint", "Opened has checkpoint"),
    Defect("flush-needs-loads", "flush-without-loads-returns-flushed", "within", hangs=True),
    Defect("commits-only-once", "transactions-see-earlier-transactions", "and must be"),
    Defect("answers-the-last-load", "valid-message-orders-are-accepted", "and must be"),
    Defect("checkpoint-is-text", "open-returns-last-checkpoint", "Opened has checkpoint"),
    Defect("loads-too-early", "loaded-follows-acknowledged", "Loaded"),
    Defect("leaves-out-nulls", "load-returns-stored-document", "and must be"),
    Defect("null-for-missing", "load-of-missing-key-returns-nothing", "no JSON object"),
    Defect("flushes-early", "flushed-follows-last-loaded", "300 of 600"),
    Defect("loads-while-committing", "pipelined-load-returns-committed-document", "older"),
    Defect("writes-through", "load-omits-uncommitted-documents", "no transaction has committed"),
    Defect("mixes-bindings", "bindings-have-separate-documents", "of 1 in 1"),
    Defect("first-key-field-only", "key-of-several-fields-is-accepted", "twice"),
    Defect("keeps-the-first", "store-replaces-document", "older"),
    Defect("drops-deletes", "store-with-deletes-removes-document", "was removed, but exists"),
    Defect("delete-must-exist", "delete-of-missing-key-is-no-error", "does not exist"),
    Defect("trusts-exists", "store-with-wrong-exists-keeps-one-document", "newer"),
    Defect("takes-a-key-twice", "duplicate-key-in-transaction-is-rejected", "in one Store"),
    Defect("looks-within-a-store", "duplicate-key-in-transaction-is-rejected", "in two Stores"),
    Defect(
        "takes-a-key-twice", "duplicate-key-in-transaction-is-rejected", "in one Store", WRITTEN
    ),
    Defect("forgets-after-many", "many-documents-are-stored", "is missing"),
    Defect("forgets-after-many", "many-documents-are-stored", "does not print", PUSHED),
    Defect("takes-slices-in-order", "slices-in-any-order-are-accepted", "key"),
    Defect("refuses-large", "large-document-is-stored", "too large"),
    Defect("ascii-only", "unusual-values-are-preserved", "which no Load requested"),
    Defect("numbers-are-doubles", "numbers-of-64-bits-are-exact", "which no Load requested"),
    Defect("cuts-at-nul", "nul-character-is-preserved-or-rejected", "which no Load requested"),
    Defect(
        "empties-nothing",
        "store-with-empties-truncates-at-commit",
        "was removed, but exists",
        WRITTEN,
    ),
    Defect("empties-at-once", "store-with-empties-truncates-at-commit", "is missing"),
    Defect(
        "empties-anytime",
        "store-with-late-or-partial-empties-is-rejected",
        "after another, was not rejected",
    ),
    Defect("delta-keeps-all", "delta-binding-with-empties-is-truncated", "must print it 0 times"),
    Defect("ignores-delta", "delta-binding-appends-every-document", "does not print"),
    Defect("ignores-delta", "delta-binding-appends-every-document", "does not print", PUSHED),
    Defect("delta-needs-no-flush", "delta-binding-transaction-is-committed", "within", hangs=True),
    Defect("commits-on-cancel", "cancelled-store-is-rolled-back", "broken off"),
    Defect("keeps-loads", "cancelled-load-has-no-effect", "which no Load requested"),
    Defect("keeps-the-lock", "cancelled-stream-releases-resources", "no Opened within", hangs=True),
    Defect("lets-both-live", "second-open-fences-first-shard", "reached Acknowledged", STAGED),
    Defect("lets-both-live", "second-open-fences-first-shard", "reached Acknowledged", PUSHED),
    Defect(
        "waits-for-the-older", "second-open-fences-shard-in-store", "no Opened within", hangs=True
    ),
    Defect(
        "fences-equal-ranges",
        "open-of-overlapping-range-fences-shard",
        "reached Acknowledged",
        STAGED,
    ),
    Defect("fences-everyone", "open-of-disjoint-range-fences-nothing", "taken over"),
    Defect("fences-other-tasks", "open-of-other-materialization-fences-nothing", "taken over"),
    Defect(
        "inherits-nothing", "split-shards-resume-from-parent-checkpoint", "Opened has checkpoint"
    ),
    Defect(
        "fences-equal-ranges",
        "split-shards-resume-from-parent-checkpoint",
        "reached Acknowledged",
        WRITTEN,
    ),
    Defect(
        "inherits-from-the-widest",
        "shards-split-twice-resume-from-narrowest-checkpoint",
        "Opened has checkpoint",
    ),
    Defect("resurrects", "joined-shard-resumes-from-last-checkpoint", "Earlier checkpoints were"),
    Defect(
        "joins-two",
        "shard-joined-from-four-resumes-from-last-checkpoint",
        "Earlier checkpoints were",
    ),
    Defect("forgets-the-fence", "zombie-cannot-commit", "reached Acknowledged"),
    Defect("locks-in-store", "zombie-in-store-does-not-block-open", "within", hangs=True),
    Defect("applies-all-staged", "zombie-staged-work-is-never-applied", "of the zombie", STAGED),
    Defect("older-overwrites", "late-store-keeps-newer-document", "of the older", WRITTEN),
    Defect("forgets-on-open", "restart-after-open-resumes", "is missing"),
    Defect("load-removes", "restart-after-load-resumes", "is missing"),
    Defect("flush-removes", "restart-after-flush-resumes", "is missing"),
    Defect("writes-through", "restart-after-store-resumes", "newer"),
    Defect("checkpoint-apart", "restart-after-start-commit-resumes", "newer"),
    Defect("stages-in-memory", "restart-after-started-commit-resumes", "newer", STAGED),
    Defect(
        "acknowledges-before-commit", "restart-after-acknowledge-resumes", "Opened has checkpoint"
    ),
    Defect("checkpoint-in-memory", "checkpoint-survives-restart", "Opened has checkpoint"),
    Defect(
        "first-acknowledge-applies-nothing",
        "staged-work-is-applied-before-first-acknowledged",
        "newer",
        STAGED,
    ),
    Defect("applies-twice", "staged-work-is-applied-once", "4 times", STAGED),
    *(
        Defect(
            f"bears-{name}",
            f"{name}-is-rejected",
            "was not rejected",
            process=not name.find("first"),
        )
        for name in (
            "empty-request",
            "garbage",
            "request-with-two-fields",
            "first-message-other-than-open",
            "open-without-version",
            "open-with-reversed-range",
            "second-open",
            "flush-before-acknowledge",
            "second-acknowledge",
            "store-before-flush",
            "start-commit-before-flush",
            "start-commit-without-checkpoint",
            "load-after-flush",
            "load-without-keys",
            "load-outside-arena",
            "load-with-reversed-slice",
            "load-of-missing-binding",
            "store-with-unequal-lists",
            "store-without-exists",
            "store-without-documents",
            "store-outside-arena",
            "store-with-unequal-deletes",
            "store-to-missing-binding",
            "end-after-load",
            "end-after-store",
        )
    ),
    *(
        Defect("answers-about-none", check, "Validated has 0 bindings")
        for check in (
            "validate-returns-all-bindings-in-order",
            "validate-reports-accepts-delete",
            "apply-accepts-validated-bindings",
        )
    ),
)
