#!/usr/bin/env python3
"""Count phrases that the project's style rules ban, per 1000 words, and flag banned names.

    lint_prose.py src docs README.md            report: worst files and banned names
    lint_prose.py --max 5 src/penstock/persist  exit 1 if a file exceeds 5 per 1000 words
    lint_prose.py --max 5 --strict src          also exit 1 on banned names and openings
    lint_prose.py --phrases src/penstock/cli    print every match as FILE:LINE: phrase

The style rules ask for plain technical English: short sentences in the active voice, the terms
of the Postgres, Kafka and Spark documentation, nouns for modules and classes, verbs for
functions. `make check` applies this script to LANGUAGE_PATHS in the Makefile.

Prose is docstrings, comments, messages (error, log, help and other sentence-like strings)
and Markdown or reStructuredText. Code in backticks and fenced blocks is not prose. A single
match is legitimate English; the rate is the measure. Well-edited projects stay below 3.

The script depends on the standard library only.
"""

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MIN_WORDS = 60
"""Files with fewer words are reported but never fail: one match would decide the rate."""

SUFFIXES = {".py", ".md", ".rst"}
SKIPPED_DIRS = {".git", ".venv", "node_modules", "_generated", "__pycache__", "build", "dist"}

MARKERS: dict[str, str] = {
    "noun clause with 'what'": (
        r"\bwhat (?:is|was|were|are|it|they|we|a|an|the|there|has|have|had|came|comes|goes|can"
        r"|cannot|must|may|would|befalls|becomes|stands)\b"
    ),
    "tell/told": r"\b(?:tell|tells|told|telling)\b",
    "so that": r"\bso that\b",
    "whoever/whatever/nobody": r"\b(?:who|what|which)ever\b|\b(?:no|some|any|every)body\b",
    "come/go": r"\b(?:comes?|came|goes|go on|gone)\b",
    "one that/those that": r"\b(?:ones? that|those that|those of|that of|that which)\b",
    "archaic": r"\b(?:anew|besides?|lest|heeds?|mend|mended|befalls?|meanwhile|thereby|alike)\b",
    "let it/let there": r"\blets? (?:it|them|us|go|what|there|the|a)\b",
    "of which/in whose": r"\b(?:of|in|by|at|from|under|with|over|for) (?:which|whom|whose)\b",
}
MARKER = re.compile(
    "|".join(f"(?P<m{i}>{p})" for i, p in enumerate(MARKERS.values())), re.IGNORECASE
)

OPENING = re.compile(r"\s*(?:What|Whether|Let|How|As what|Of|That|For people)\b")
"""First words of a docstring that are banned: a docstring opens with a verb or a noun phrase."""

BANNED_WORDS: dict[str, str] = {
    "acceptance": "schema_check",
    "anew": "again",
    "apart": "separate, dead_letter",
    "aside": "side_state",
    "ask": "request",
    "asked": "requested",
    "asking": "control",
    "asks": "requests",
    "baton": "lock_handoff",
    "befalls": "happens",
    "bell": "notifier",
    "beside": "embedded",
    "bite": "chunk",
    "bites": "chunks",
    "came": "arrived, inserts",
    "carrying": "error_transport",
    "chance": "rng",
    "chosen": "selected, spec",
    "come": "inserts",
    "comes": "inserts",
    "cure": "drift_action",
    "cured": "repaired",
    "cures": "drift_actions",
    "deaf": "closed",
    "draw": "read_into",
    "drawn": "read",
    "each": "name the element",
    "ear": "listener",
    "elsewhere": "remote",
    "followed": "tracked tables, table_set",
    "found": "name the result",
    "gauge": "position",
    "gone": "deletes, missing",
    "hear": "receive",
    "heard": "received",
    "hearer": "handler",
    "hears": "receives",
    "heed": "accept",
    "heeds": "is_active",
    "intake": "input_validation",
    "kept": "stored, retained",
    "lacking": "missing",
    "lacks": "misses",
    "lakeside": "inputs",
    "lives": "is_alive",
    "look": "inspect",
    "looker": "inspector",
    "looking": "inspect",
    "measures": "units",
    "mend": "repair",
    "mended": "repaired",
    "misfit": "schema_mismatch",
    "moments": "timestamps",
    "netting": "last_row_per_key",
    "notes": "state",
    "nowhere": "missing_position",
    "nudge": "heartbeat",
    "offer": "plan_next",
    "overheard": "sqlstate_from_trace",
    "piece": "split",
    "pieces": "splits",
    "recall": "get",
    "resent": "duplicates",
    "rounds": "commit_barrier",
    "said": "text, reported",
    "settled": "acknowledged",
    "showing": "render",
    "shown": "rendered",
    "splitters": "range_boundaries",
    "steady": "retrying",
    "summing": "consolidation",
    "tell": "report",
    "teller": "reporter",
    "telling": "progress",
    "tells": "reports",
    "there": "exists",
    "told": "report, status",
    "unkept": "decoded",
    "unmake": "drop",
    "upkeep": "maintenance",
    "upto": "up_to",
    "wanted": "requested, expected",
    "wish": "preferences",
    "workings": "runtime",
}
BANNED_NAMES: dict[str, str] = {
    "also": "collection_change",
    "goes_on": "continues",
    "here": "local",
    "pass_by": "hit",
    "share_out": "rebalance",
    "take_up": "attach",
    "write_down": "put",
}
NOUNS_IN_ING_OR_ED = {
    "binding", "bindings", "embedded", "encoding", "grouping", "hashing", "indexing", "logging",
    "packed", "packing", "ranking", "routing", "sharding", "staging", "string", "testing",
    "timing", "typing", "unpacking", "warning", "feed", "seed",
}  # fmt: skip
"""Words in -ing or -ed that the field uses as nouns, and so may name a module."""

MESSAGE_KEYWORDS = {"detail", "hint", "help", "message", "msg", "reason", "short_help", "epilog"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "echo", "secho"}


@dataclass(frozen=True)
class Match:
    """One marker phrase, at a line of a file."""

    line: int
    marker: str
    text: str


@dataclass(frozen=True)
class BannedName:
    """A module, class, function or parameter name that the style rules replace."""

    path: Path
    line: int
    kind: str
    name: str
    instead: str


@dataclass
class FileReport:
    """Everything found in one file."""

    path: Path
    words: int = 0
    matches: list[Match] = field(default_factory=list)
    openings: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return marker phrases per 1000 words."""
        return 1000 * len(self.matches) / self.words if self.words else 0.0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parse_arguments(argv)
    reports: list[FileReport] = []
    banned: list[BannedName] = []
    for path in _files(options.paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".py":
            try:
                tree = ast.parse(text)
            except SyntaxError as error:
                print(f"{path}:{error.lineno}: cannot parse: {error.msg}", file=sys.stderr)
                continue
            reports.append(_python_report(path, text, tree))
            banned.extend(_banned_names(path, tree))
        else:
            reports.append(_report(path, [(1, _without_markup(text))]))
    if options.phrases:
        for report in reports:
            for match in sorted(report.matches, key=lambda match: match.line):
                print(f"{report.path}:{match.line}: {match.text!r} ({match.marker})")
    _print_summary(reports, banned, top=options.top)
    return _exit_status(reports, banned, limit=options.max, strict=options.strict)


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Count banned phrases per 1000 words of prose, and flag banned names."
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument(
        "--max", type=float, metavar="N", help="Exit 1 if a file exceeds N phrases per 1000 words."
    )
    parser.add_argument(
        "--strict", action="store_true", help="Also exit 1 on banned names and openings."
    )
    parser.add_argument("--top", type=int, default=15, help="Print this many of the worst files.")
    parser.add_argument("--phrases", action="store_true", help="Print every match.")
    return parser.parse_args(argv)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
        elif not path.exists():
            raise SystemExit(f"{path}: no such file or directory")
        else:
            for candidate in sorted(path.rglob("*")):
                skipped = SKIPPED_DIRS.intersection(candidate.parts)
                if candidate.suffix in SUFFIXES and candidate.is_file() and not skipped:
                    yield candidate


# Prose.


def _python_report(path: Path, text: str, tree: ast.Module) -> FileReport:
    docstrings = list(_docstrings(tree))
    segments = [*docstrings, *_comments(text), *_messages(tree)]
    report = _report(path, [(line, _without_code(prose)) for line, prose in segments])
    report.openings = [line for line, prose in docstrings if OPENING.match(prose)]
    return report


def _report(path: Path, segments: Iterable[tuple[int, str]]) -> FileReport:
    report = FileReport(path)
    names = list(MARKERS)
    for line, prose in segments:
        report.words += len(re.findall(r"[A-Za-z']+", prose))
        for match in MARKER.finditer(prose):
            marker = names[int((match.lastgroup or "m0")[1:])]
            at_line = line + prose.count("\n", 0, match.start())
            report.matches.append(Match(at_line, marker, " ".join(match.group().split())))
    return report


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, including those under fields and constants."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(prose)) as constant):
                yield constant.lineno, prose


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_pragma = re.match(r"#\s*(?:noqa|type:|fmt:|!)", token.string)
        if token.type == tokenize.COMMENT and not is_pragma:
            yield token.start[0], token.string.lstrip("# ")


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield strings that a person reads: raised, logged, given as help, or sentence-like."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    certain: set[int] = set()
    inside_f_string: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside_f_string.update(id(part) for part in node.values)
        if isinstance(node, ast.Call):
            is_log = isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS
            if is_log and node.args:
                certain.add(id(node.args[0]))
            certain.update(id(k.value) for k in node.keywords if k.arg in MESSAGE_KEYWORDS)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            certain.add(id(node.exc.args[0]))
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in inside_f_string:
            continue
        prose = _string_of(node)
        if prose and (id(node) in certain or _is_sentence(prose)):
            yield getattr(node, "lineno", 1), prose


def _string_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_string_of(part) or "`x`" for part in parts)
    return ""


def _is_sentence(text: str) -> bool:
    """Return whether a string looks like a message rather than code, SQL or a pattern."""
    tokens = text.split()
    plain = [token for token in tokens if re.fullmatch(r"[A-Za-z']+[.,;:]?", token)]
    shouted = [token for token in plain if token.isupper() and len(token) > 1]
    count = len(tokens)
    return count >= 5 and len(plain) >= 0.7 * count and len(shouted) <= 0.2 * count


def _without_code(prose: str) -> str:
    """Blank out code in backticks, keeping the line breaks."""
    return re.sub(r"(`{1,2})(?!`).+?\1", _blank, prose, flags=re.DOTALL)


def _without_markup(text: str) -> str:
    """Blank out fenced blocks, code in backticks, HTML comments and link targets."""
    text = re.sub(r"^([ \t]*)(```|~~~).*?^\s*\2", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return re.sub(r"(`{1,2})(?!`)[^\n]+?\1", _blank, text)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


# Names.


def _banned_names(path: Path, tree: ast.Module) -> Iterator[BannedName]:
    module = path.parent.name if path.stem in {"__init__", "__main__"} else path.stem
    instead = _banned(module) or _not_a_noun(module)
    if instead:
        yield BannedName(path, 1, "module", module, instead)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            kind = "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "function"
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in arguments:
                if instead := _banned(argument.arg):
                    yield BannedName(path, argument.lineno, "parameter", argument.arg, instead)
        else:
            continue
        if instead := _banned(node.name):
            yield BannedName(path, node.lineno, kind, node.name, instead)


def _banned(name: str) -> str:
    if name.startswith("test_") or (name.startswith("__") and name.endswith("__")):
        return ""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]
    if instead := BANNED_NAMES.get("_".join(words)):
        return instead
    if "not" in words:  # NotFound is the field's own word.
        words = [word for word in words if word != "found"]
    return next((BANNED_WORDS[word] for word in words if word in BANNED_WORDS), "")


def _not_a_noun(module: str) -> str:
    last = module.strip("_").rpartition("_")[2]
    if re.search(r"(?:ing|ed)$", last) and last not in NOUNS_IN_ING_OR_ED:
        return "a noun for the concept"
    return ""


# Reports.


def _print_summary(reports: list[FileReport], banned: list[BannedName], *, top: int) -> None:
    words = sum(report.words for report in reports)
    matches = [match for report in reports for match in report.matches]
    long_enough = [report for report in reports if report.words > MIN_WORDS]
    rates = [report.rate for report in long_enough]
    print(f"{len(reports)} files, {words} words, {len(matches)} phrases")
    if words:
        print(f"all: {1000 * len(matches) / words:.1f} per 1000 words", end="")
        print(f"; median of {len(rates)} files: {statistics.median(rates):.1f}" if rates else "")
    for marker, count in Counter(match.marker for match in matches).most_common():
        print(f"  {1000 * count / words:6.1f}  {marker}")
    openings = sum(len(report.openings) for report in reports)
    print(f"docstrings that open with a banned word: {openings}")
    if long_enough and top:
        print("worst files, per 1000 words:")
        for report in sorted(long_enough, key=lambda report: -report.rate)[:top]:
            print(f"  {report.rate:6.1f}  {report.words:6} words  {report.path}")
    print(f"banned names: {len(banned)}")
    for kind, count in Counter(name.kind for name in banned).most_common():
        print(f"  {count:6}  {kind}")
    for name in banned[: 2 * top]:
        print(f"  {name.path}:{name.line}: {name.kind} {name.name} -> {name.instead}")
    if len(banned) > 2 * top:
        print(f"  ... and {len(banned) - 2 * top} more")


def _exit_status(
    reports: list[FileReport], banned: list[BannedName], *, limit: float | None, strict: bool
) -> int:
    failures = []
    if limit is not None:
        over = [report for report in reports if report.words > MIN_WORDS and report.rate > limit]
        failures += [f"{r.path}: {r.rate:.1f} per 1000 words exceeds {limit:g}" for r in over]
    if strict:
        failures += [f"{n.path}:{n.line}: {n.kind} {n.name} -> {n.instead}" for n in banned]
        failures += [f"{r.path}:{n}: docstring opening" for r in reports for n in r.openings]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(1)
