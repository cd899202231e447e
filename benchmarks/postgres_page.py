"""The page of the scoreboard, from what became of each value. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["SIDES", "WAYS", "Outcome", "Verdict", "Verdicts", "Way", "page"]

Outcome: TypeAlias = Literal[
    "exact", "respelled", "changed", "null", "dropped", "refused", "stopped", "absent"
]
Way: TypeAlias = Literal["copy", "stream"]
WAYS: Final[tuple[Way, Way]] = ("copy", "stream")

OUTCOMES: Final[Mapping[Outcome, str]] = {
    "exact": "what arrives, read by its declared meaning, is what the server prints",
    "respelled": "another spelling arrives, which the server reads as the same value, or as an "
    "equal number with fewer or more zeros at its end",
    "changed": "something else arrives",
    "null": "NULL arrives for a value that is not NULL",
    "dropped": "the record has no such column",
    "refused": "the table stops with an error that names the column and what to do",
    "stopped": "the connector ends with an error, and sends nothing that comes after it",
    "absent": "the row does not arrive",
}

SIDES: Final = {
    "default": "Debezium",
    "exact": "Debezium, other settings",
    "ours": "Penstock",
}

LONGEST: Final = 70


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one value."""

    outcome: Outcome
    row: int
    want: str
    got: str = ""


Verdicts: TypeAlias = Mapping[str, Sequence[Verdict]]
"""By case: one for each of its values that is not null."""

Results: TypeAlias = Mapping[str, Mapping[Way, Verdicts]]
"""By side and way."""


def page(
    results: Results,
    declared: Mapping[str, str],
    refused: Mapping[str, str],
    as_text: str,
    failures: Sequence[str],
    no_start: Sequence[str],
    versions: Sequence[str],
    settings: Sequence[str],
    date: str,
) -> str:
    """The whole page."""
    lines = [*_head(versions, settings, date), "", "## Totals", "", *_totals(results), ""]
    lines += ["## By column", "", *_by_column(results, declared), ""]
    for side, title in SIDES.items():
        lines += _changed(side, title, results[side], declared)
    if refused:
        lines += ["## Refused by Penstock", "", "| column | error |", "|---|---|"]
        lines += [f"| {_code(declared[case])} | {_cell(said)} |" for case, said in refused.items()]
        lines += ["", f"The same columns, kept as `text`: {as_text}.", ""]
    if no_start or failures:
        lines += ["## Failures of Debezium", ""]
        lines += [
            "- In a database that holds a domain over an enum, whether a table uses it or not, it"
            f" does not start: {_code(each, 300)}. The column of that type was left out."
            for each in no_start
        ]
        lines += [f"- {_code(each, 300)}" for each in failures]
        lines.append("")
    return "\n".join(lines)


def _head(versions: Sequence[str], settings: Sequence[str], date: str) -> list[str]:
    values = (
        "Each value of each column of the tests'"
        " [torture table](../../tests/sources/postgres/types/torture.py) was taken once by a first"
        " copy and once from the stream, and compared with what the server prints for it. NULLs are"
        " not counted."
    )
    chosen = ", ".join(f"`{each}`" for each in settings)
    meaning = (
        "Debezium's values are taken as JSON and read by the schema that comes with each: a"
        " `MicroTimestamp` is microseconds, a `Decimal` is its bytes and its scale, and the numbers"
        " that pgjdbc uses for infinity are infinity. *Debezium* is with the settings it has by"
        f" itself, *other settings* with {chosen}."
    )
    return [
        "# Postgres values, through Debezium and through Penstock",
        "",
        f"Made by `make postgres-scoreboard` on {date}; do not edit. {'; '.join(versions)}.",
        "",
        values,
        "",
        *(f"- *{outcome}*: {told}." for outcome, told in OUTCOMES.items()),
        "",
        meaning,
    ]


def _totals(results: Results) -> Iterator[str]:
    yield f"| | values | {' | '.join(OUTCOMES)} |"
    yield "|---|---" + "|---" * len(OUTCOMES) + "|"
    for side, title in SIDES.items():
        for way in WAYS:
            counts = Counter(each.outcome for some in results[side][way].values() for each in some)
            cells = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
            yield f"| {title}, {way} | {counts.total()} | {cells} |"


def _by_column(results: Results, declared: Mapping[str, str]) -> Iterator[str]:
    heads = " | ".join(f"{title}, {way}" for title in SIDES.values() for way in WAYS)
    yield f"| column | values | {heads} |"
    yield "|---|---" + "|---" * (len(SIDES) * len(WAYS)) + "|"
    for case, kind in declared.items():
        cells = [_summary(results[side][way].get(case)) for side in SIDES for way in WAYS]
        count = len(results["ours"]["copy"][case])
        told = f" ({case})" if list(declared.values()).count(kind) > 1 else ""
        yield f"| {_code(kind)}{told} | {count} | {' | '.join(cells)} |"


def _summary(verdicts: Sequence[Verdict] | None) -> str:
    if verdicts is None:
        return "does not start"
    counts = Counter(each.outcome for each in verdicts)
    if set(counts) <= {"exact"}:
        return "exact"
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{counts[each]} {each}" for each in OUTCOMES if counts[each])


def _changed(
    side: str, title: str, ways: Mapping[Way, Verdicts], declared: Mapping[str, str]
) -> list[str]:
    """Values that arrive as others, each with the ways on which it does."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for way in WAYS:
        for case, verdicts in ways[way].items():
            for each in verdicts:
                if each.outcome in ("respelled", "changed", "stopped"):
                    key = (case, each.want, each.got, each.outcome)
                    found.setdefault(key, []).append(way)
    lines = [f"## Not as they are: {title}", ""]
    if not found:
        return [*lines, "No value arrives as another.", ""]
    lines += ["| column | the server prints | arrives as | by | |", "|---|---|---|---|---|"]
    lines += [
        f"| {_code(declared[case])} | {_code(want)} | {_code(got)} | {', '.join(by)} | {outcome} |"
        for (case, want, got, outcome), by in sorted(
            found.items(), key=lambda item: list(declared).index(item[0][0])
        )
    ]
    return [*lines, ""]


def _code(text: str, longest: int = LONGEST) -> str:
    """As code in a cell of a table; what cannot be seen is escaped, what is long is cut."""
    seen = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    if len(seen) > longest:
        seen = f"{seen[:longest]}…"
    if not seen:
        return "(empty)"
    ticks = "``" if "`" in seen else "`"
    space = " " if ticks == "``" or seen.startswith(" ") or seen.endswith(" ") else ""
    return f"{ticks}{space}{_cell(seen)}{space}{ticks}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
