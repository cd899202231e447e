"""What benchmarks share: figures, sides measured in turn, and how results are told.

Both sides of a figure are measured in one run, in turn (ours, theirs, theirs,
ours, …), so that a disturbed machine disturbs both; what is compared are
medians. Each figure is a line for people as it comes, and the last line is one
JSON object for machines.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Figure", "Measured", "in_turn", "main", "medians"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure, and the medians it was made from; no value if it could not be measured.

    A figure of several cases is a mapping from their names.
    """

    value: float | Mapping[str, float] | None
    shown: str
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the figures: how it is measured, and what we aim at."""

    measure: Callable[[Any], Measured]
    aim: str
    met: Callable[[float], bool]


def in_turn(
    repetitions: int, ours: Callable[[], Any], theirs: Callable[[], Any]
) -> tuple[list[Any], list[Any]]:
    """What each gave, called in turn; who goes first changes every time."""
    found: tuple[list[Any], list[Any]] = ([], [])
    sides = ((ours, found[0]), (theirs, found[1]))
    for number in range(repetitions):
        for call, results in sides if number % 2 == 0 else sides[::-1]:
            results.append(call())
    return found


def medians(sides: tuple[list[float], list[float]]) -> tuple[float, float]:
    """The middle of each side."""
    return statistics.median(sides[0]), statistics.median(sides[1])


def main(
    title: str,
    figures: Mapping[str, Figure],
    prepare: Callable[[Path, bool], AbstractContextManager[Any]],
    *,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> None:
    """Measure what the command line asks for, one figure after the other, on what `prepare` gives.

    `prepare` gets an empty folder, which is removed at the end, and whether to be quick.
    `parents` know what more the command line may ask for, and is read by whoever calls.
    """
    parser = argparse.ArgumentParser(description=title, parents=list(parents))
    parser.add_argument("--dir", type=Path, help="measure on this folder's disk [build/]")
    parser.add_argument("--quick", action="store_true", help="less of everything, rougher figures")
    parser.add_argument("--only", action="append", choices=figures, help="just this; repeatable")
    asked_for = parser.parse_args()
    parent = asked_for.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    rough = "; quick: rough" if asked_for.quick else ""
    print(f"{os.cpu_count()} cores, load {load}{rough}", flush=True)
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": asked_for.quick, "load_at_start": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder,
        prepare(Path(folder), asked_for.quick) as bench,
    ):
        for name in asked_for.only or figures:
            begun = time.perf_counter()
            measured = figures[name].measure(bench)
            values[name], raw[name] = _rounded(measured.value), _rounded(measured.raw)
            print(_line(name, figures[name], measured, time.perf_counter() - begun), flush=True)
    print(json.dumps({**values, "raw": raw}))


def _line(name: str, figure: Figure, measured: Measured, took_s: float) -> str:
    if measured.value is None:
        return f"{name}: not measured: {measured.shown}"
    cases = measured.value if isinstance(measured.value, Mapping) else {"ratio": measured.value}
    told = ", ".join(
        f"{case} {value:.3f} {'met' if figure.met(value) else 'MISSED'}"
        for case, value in cases.items()
    )
    return f"{name}: {measured.shown}; aim {figure.aim}: {told} ({took_s:.0f} s)"


def _rounded(value: Any) -> Any:
    """Three places, of which the last is noise."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value
