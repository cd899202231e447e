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

from penstock import __version__
from penstock.persist.state import END
from penstock.supervisor.status import MaterializationStatus, SourceStatus, State
from penstock.web.page_state import PageMaterialization, PageSource, PageState

__all__ = ["CONTENT_TYPE", "METRICS", "MetricDefinition", "exposition"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

Samples = Iterator[tuple[tuple[str, ...], float | None]]
"""Values of the labels, and the value; None if there is no sample."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """Definition of one metric."""

    name: str
    """Prometheus name; a counter ends in `_total`."""

    labels: tuple[str, ...]
    samples: Callable[[PageState], Samples]
    help: str


def exposition(state: PageState) -> bytes:
    """Return the metrics in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, state: PageState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        for metric in METRICS:
            is_counter = metric.name.endswith("_total")
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.samples(self._state):
                if value is not None:
                    family.add_metric(labels, value)
            yield family


def _source(
    name: str, value: Callable[[SourceStatus], float | None], text: str
) -> MetricDefinition:
    """Return a metric with one sample for each source."""

    def samples(state: PageState) -> Samples:
        return (((source.name,), value(source.status)) for source in state.sources)

    return MetricDefinition(name, ("source",), samples, text)


def _materialization(
    name: str, value: Callable[[MaterializationStatus], float | None], text: str
) -> MetricDefinition:
    """Return a metric with one sample for each materialization."""

    def samples(state: PageState) -> Samples:
        return (((task.name,), value(task.status)) for task in state.materializations)

    return MetricDefinition(name, ("materialization",), samples, text)


def _collection(
    name: str, value: Callable[[Mapping[str, Any]], float | None], text: str
) -> MetricDefinition:
    """Return a metric with one sample for each collection."""

    def samples(state: PageState) -> Samples:
        return (
            ((collection["name"], collection["source"] or ""), value(collection))
            for collection in state.collections
        )

    return MetricDefinition(name, ("collection", "source"), samples, text)


def _up(tasks: Iterable[PageSource | PageMaterialization]) -> Samples:
    return (((task.name,), float(task.state == State.RUNNING)) for task in tasks)


def _restarts(state: PageState) -> Samples:
    for source in state.sources:
        yield (source.name, "source"), source.restarts
    for materialization in state.materializations:
        yield (materialization.name, "materialization"), materialization.restarts


def _seconds(ms: int | None) -> float | None:
    """Return milliseconds in seconds; the end of time is infinity."""
    return None if ms is None else float("inf") if ms == END else ms / 1_000


def _upper_seconds(status: MaterializationStatus) -> float | None:
    return _seconds(status.upper) if "upper" in status.keys else None


METRICS: Final = (
    MetricDefinition(
        "penstock_source_up", ("source",), lambda state: _up(state.sources),
        "1 while the source runs; 0 if it is stopped, paused or about to be restarted.",
    ),
    _source(
        "penstock_source_lag_seconds", lambda status: _seconds(status.lag_ms),
        "Lag of its collections behind the current time. Absent while it is stopped.",
    ),
    _source(
        "penstock_source_lag_bytes", lambda status: status.lag_bytes,
        "Lag behind upstream, in bytes of the upstream log.",
    ),
    _source(
        "penstock_source_lag_records", lambda status: status.lag_records,
        "Lag behind the topic, in records.",
    ),
    _source(
        "penstock_source_bad_records_total", lambda status: status.bad_records,
        "Records dead-lettered since its process started, because they could not be decoded.",
    ),
    _source(
        "penstock_source_waiting_events", lambda status: status.waiting_events,
        "Events of incomplete transactions over several topics.",
    ),
    _source(
        "penstock_source_slot_bytes", lambda status: status.slot_bytes,
        "Bytes of log that its replication slot makes the server retain.",
    ),
    _source(
        "penstock_source_rows_total", lambda status: status.rows,
        "Rows it has read since its process started.",
    ),
    _source(
        "penstock_source_bytes_total", lambda status: status.bytes,
        "Bytes it has read since its process started.",
    ),
    _collection(
        "penstock_collection_since_seconds", lambda collection: _seconds(collection["since"]),
        "Earliest time at which it can be read, in seconds since the epoch.",
    ),
    _collection(
        "penstock_collection_upper_seconds", lambda collection: _seconds(collection["upper"]),
        "Time up to which it is complete, in seconds since the epoch; +Inf if it is closed.",
    ),
    _collection(
        "penstock_collection_bytes", lambda collection: collection["bytes"],
        "Stored size of its batches.",
    ),
    _collection(
        "penstock_collection_batches", lambda collection: collection["batches"],
        "Number of its batches.",
    ),
    _collection(
        "penstock_collection_errored", lambda collection: float(collection["error"] is not None),
        "1 while reading its latest time is an error.",
    ),
    MetricDefinition(
        "penstock_materialization_up", ("materialization",),
        lambda state: _up(state.materializations),
        "1 while the materialization runs; 0 if it is stopped, paused or about to be restarted.",
    ),
    _materialization(
        "penstock_materialization_lag_seconds", lambda status: _seconds(status.lag_ms),
        "Lag of the endpoint's last commit behind the collections.",
    ),
    _materialization(
        "penstock_materialization_upper_seconds", _upper_seconds,
        "Time up to which the endpoint has all changes, in seconds since the epoch.",
    ),
    _materialization(
        "penstock_materialization_documents_total", lambda status: status.documents,
        "Documents stored since its process started.",
    ),
    _materialization(
        "penstock_materialization_bytes_total", lambda status: status.bytes,
        "Bytes of documents stored since its process started.",
    ),
    _materialization(
        "penstock_materialization_transactions_total", lambda status: status.transactions or 0,
        "Transactions committed since its process started.",
    ),
    _materialization(
        "penstock_materialization_degraded", lambda status: float(len(status.left_behind)),
        "Collections in error whose bindings are frozen; 0 while all bindings advance.",
    ),
    MetricDefinition(
        "penstock_task_restarts_total", ("task", "kind"), _restarts,
        "Restarts of the source or materialization after a failure, since its process started.",
    ),
    MetricDefinition(
        "penstock_build_info", ("version",), lambda _: iter([((__version__,), 1.0)]),
        "Always 1; its label is the version.",
    ),
)  # fmt: skip
"""All metrics, in the order of docs/reference/metrics.md."""
