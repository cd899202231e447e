"""Shared code of the benchmarks: figures, alternating measurements, output.

Both sides of a figure are measured in one run, in alternating order (ours, theirs, theirs,
ours, …): other load on the machine affects both sides. Figures are ratios of medians. Each
figure is printed as a line when it is measured; the last line is one JSON object.
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
    """Value of a figure and its medians. The value is None if it could not be measured.

    The value of a figure with several cases is a mapping by case.
    """

    value: float | Mapping[str, float] | None
    summary: str
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its measurement and its aim."""

    measure: Callable[[Any], Measured]
    aim: str
    met: Callable[[float], bool]


def in_turn(
    repetitions: int, ours: Callable[[], Any], theirs: Callable[[], Any]
) -> tuple[list[Any], list[Any]]:
    """Call both sides repeatedly, in alternating order, and return the results of each."""
    results: tuple[list[Any], list[Any]] = ([], [])
    sides = ((ours, results[0]), (theirs, results[1]))
    for number in range(repetitions):
        for call, side_results in sides if number % 2 == 0 else sides[::-1]:
            side_results.append(call())
    return results


def medians(sides: tuple[list[float], list[float]]) -> tuple[float, float]:
    """Return the median of each side."""
    return statistics.median(sides[0]), statistics.median(sides[1])


def main(
    title: str,
    figures: Mapping[str, Figure],
    prepare: Callable[[Path, bool], AbstractContextManager[Any]],
    *,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> None:
    """Measure the figures that the command line selects, with the object of `prepare`.

    `prepare` gets an empty folder, which is removed at the end, and the option `--quick`.
    `parents` define more options; the caller parses those.
    """
    parser = argparse.ArgumentParser(description=title, parents=list(parents))
    parser.add_argument("--dir", type=Path, help="Measure on the disk of this folder. [build/]")
    parser.add_argument(
        "--quick", action="store_true", help="Use smaller counts; figures are less exact."
    )
    parser.add_argument(
        "--only", action="append", choices=figures, help="Measure only this figure. Repeatable."
    )
    options = parser.parse_args()
    parent = options.dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(parents=True, exist_ok=True)
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    note = "; quick, less exact" if options.quick else ""
    print(f"{os.cpu_count()} cores, load {load}{note}", flush=True)
    values: dict[str, Any] = {}
    raw: dict[str, Any] = {"quick": options.quick, "load_at_start": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve()) as folder,
        prepare(Path(folder), options.quick) as bench,
    ):
        for name in options.only or figures:
            begun = time.perf_counter()
            measured = figures[name].measure(bench)
            values[name], raw[name] = _rounded(measured.value), _rounded(measured.raw)
            print(_line(name, figures[name], measured, time.perf_counter() - begun), flush=True)
    print(json.dumps({**values, "raw": raw}))


def _line(name: str, figure: Figure, measured: Measured, took_s: float) -> str:
    if measured.value is None:
        return f"{name}: not measured: {measured.summary}"
    cases = measured.value if isinstance(measured.value, Mapping) else {"ratio": measured.value}
    results = ", ".join(
        f"{case} {value:.3f} {'met' if figure.met(value) else 'MISSED'}"
        for case, value in cases.items()
    )
    return f"{name}: {measured.summary}; aim {figure.aim}: {results} ({took_s:.0f} s)"


def _rounded(value: Any) -> Any:
    """Round to three decimal places."""
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value
