"""Prometheus metrics, computed from the state at the time of the request.

This module counts nothing. It exposes the counters of the tasks unchanged, so a metric never
disagrees with the page.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.persist.state import END

__all__ = ["CONTENT_TYPE", "METRICS", "Told", "exposition"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

Thing = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """Definition of one metric."""

    name: str
    """Prometheus name; a counter ends in `_total`."""

    of: str
    """List of the state that the metric describes: each element has one value."""

    labels: tuple[str, ...]
    value: Callable[[Thing], float | None]
    """Returns None if an element has no value."""

    help: str


def exposition(state: Mapping[str, Any]) -> bytes:
    """Return the metrics in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        for metric in METRICS:
            yield _family(metric, _things(metric.of, self._state))


def _family(metric: Told, things: Iterator[Thing]) -> Metric:
    kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for thing in things:
        value = metric.value(thing)
        if value is not None:
            labels = [str(thing.get(label) or "") for label in metric.labels]
            family.add_metric(labels, value)
    return family


def _things(of: str, state: Mapping[str, Any]) -> Iterator[Thing]:
    match of:
        case "build":
            yield {"version": state["version"]}
        case "tasks":
            for kind in ("source", "materialization"):
                for each in state[f"{kind}s"]:
                    yield {**each, "task": each["name"], "kind": kind}
        case _:
            for each in state[of]:
                yield {**each, of[:-1]: each["name"]}


def _field(name: str) -> Callable[[Thing], float | None]:
    return lambda thing: thing.get(name)


def _seconds(name: str) -> Callable[[Thing], float | None]:
    """Return a function from an element to seconds; the end of time is infinity."""

    def value(thing: Thing) -> float | None:
        ms = thing.get(name)
        return None if ms is None else float("inf") if ms == END else ms / 1_000

    return value


def _up(thing: Thing) -> float:
    return float(thing["state"] == "running")


_COLLECTION: Final = ("collection", "source")

METRICS: Final = (
    Told(
        "penstock_source_up", "sources", ("source",), _up,
        "1 while the source runs; 0 if it is stopped, paused or about to be restarted.",
    ),
    Told(
        "penstock_source_lag_seconds", "sources", ("source",), _seconds("lag_ms"),
        "How far its collections are behind now. Absent while it is stopped.",
    ),
    Told(
        "penstock_source_lag_bytes", "sources", ("source",), _field("lag_bytes"),
        "How far it is behind upstream, in the bytes of upstream's log.",
    ),
    Told(
        "penstock_source_lag_records", "sources", ("source",), _field("lag_records"),
        "How many records of a topic it is behind.",
    ),
    Told(
        "penstock_source_bad_records_total", "sources", ("source",), _field("bad_records"),
        "Records that could not be decoded and were set aside, since its process started.",
    ),
    Told(
        "penstock_source_waiting_events", "sources", ("source",), _field("waiting_events"),
        "Events of transactions over several topics that are not whole yet.",
    ),
    Told(
        "penstock_source_slot_bytes", "sources", ("source",), _field("slot_bytes"),
        "How much log its replication slot makes the server keep.",
    ),
    Told(
        "penstock_source_rows_total", "sources", ("source",), _field("rows"),
        "Rows it has read since its process started.",
    ),
    Told(
        "penstock_source_bytes_total", "sources", ("source",), _field("bytes"),
        "Bytes it has read since its process started.",
    ),
    Told(
        "penstock_collection_since_seconds", "collections", _COLLECTION, _seconds("since"),
        "From which time on it can be read, in seconds since the epoch.",
    ),
    Told(
        "penstock_collection_upper_seconds", "collections", _COLLECTION, _seconds("upper"),
        "Up to which time it is complete, in seconds since the epoch; +Inf if it is closed.",
    ),
    Told(
        "penstock_collection_bytes", "collections", _COLLECTION, _field("bytes"),
        "The size of its batches as stored.",
    ),
    Told(
        "penstock_collection_batches", "collections", _COLLECTION, _field("batches"),
        "How many batches it has.",
    ),
    Told(
        "penstock_collection_errored", "collections", _COLLECTION,
        lambda thing: float(thing["error"] is not None),
        "1 while reading its latest time is an error.",
    ),
    Told(
        "penstock_materialization_up", "materializations", ("materialization",), _up,
        "1 while the materialization runs; 0 if it is stopped, paused or about to be restarted.",
    ),
    Told(
        "penstock_materialization_lag_seconds", "materializations", ("materialization",),
        _seconds("lag_ms"),
        "How far its collections have gone on beyond what is committed at the endpoint.",
    ),
    Told(
        "penstock_materialization_upper_seconds", "materializations", ("materialization",),
        _seconds("upper"),
        "Up to which time the endpoint has everything, in seconds since the epoch.",
    ),
    Told(
        "penstock_materialization_documents_total", "materializations", ("materialization",),
        _field("documents"),
        "Documents stored since its process started.",
    ),
    Told(
        "penstock_materialization_bytes_total", "materializations", ("materialization",),
        _field("bytes"),
        "Bytes of documents stored since its process started.",
    ),
    Told(
        "penstock_materialization_transactions_total", "materializations", ("materialization",),
        _field("transactions_total"),
        "Transactions committed since its process started.",
    ),
    Told(
        "penstock_materialization_degraded", "materializations", ("materialization",),
        lambda thing: float(len(thing.get("left_behind") or ())),
        "Collections in error whose bindings are frozen; 0 while all bindings advance.",
    ),
    Told(
        "penstock_task_restarts_total", "tasks", ("task", "kind"), _field("restarts"),
        "How often the process has restarted the source or materialization after a failure.",
    ),
    Told(
        "penstock_build_info", "build", ("version",), lambda _: 1.0,
        "Always 1; its label is the version.",
    ),
)  # fmt: skip
"""All metrics, in the order of docs/reference/metrics.md."""
