"""Families of Prometheus samples from rows of numbers. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvd.views import Histogram, Snapshot


def families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    prefix: str,
    rows: Iterable[tuple[str, str, float]],
    names: list[str],
    values: list[str],
) -> Iterator[Metric]:
    """A family of one sample for each row (name, help, value)."""
    for name, help_text, value in rows:
        family = kind(f"{prefix}:{name}", help_text, labels=names)
        family.add_metric(values, value)
        yield family


def by_label(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    label: str,
    parts: Mapping[str, float],
    names: list[str],
    values: list[str],
) -> Metric:
    """One family with a sample for each value of a label."""
    family = kind(name, help_text, labels=[*names, label])
    for value, count in parts.items():
        family.add_metric([*values, value], count)
    return family


def histogram_family(name: str, help_text: str, histogram: Histogram, names: list[str], values: list[str]) -> Metric:
    """One histogram as a family."""
    family = HistogramMetricFamily(name, help_text, labels=names)
    family.add_metric(values, _prometheus_buckets(histogram), histogram.sum)
    return family


def model_name(snapshot: Snapshot) -> str:
    """The first served name that is a name, as vLLM labels its series."""
    return next((name for name in snapshot.info.served_names if name != "*"), snapshot.info.model)


def _prometheus_buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Pairs (le, cumulative count); the last one is +Inf."""
    return [
        ("+Inf" if math.isinf(bound) else repr(float(bound)), count)
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
    ]
