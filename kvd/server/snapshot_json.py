"""Snapshots and log events as JSON, and back: what `/kvd/*` sends and a remote dashboard reads. Pure functions.

JSON has no infinity, so a histogram travels without its infinite last bound and gets it back on arrival. Unknown
fields are skipped, so that an older reader understands a newer server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgspec

from kvd.views import Histogram, LogEvent, Snapshot

_SNAPSHOTS = msgspec.json.Decoder(Snapshot)
_LOG_EVENTS = msgspec.json.Decoder(LogEvent)
_HISTOGRAMS = tuple(field.name for field in fields(Snapshot) if field.type == "dict[str, Histogram]")


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(snapshot_for_json(snapshot))


def snapshot_for_json(snapshot: Snapshot) -> Snapshot:
    """The same snapshot in a form that JSON can say."""
    return _with_histograms(snapshot, _finite)


def decode_snapshot(data: bytes | str) -> Snapshot:
    """The inverse of `encode_snapshot`; raises `msgspec.ValidationError` or `DecodeError` on anything else."""
    return _with_histograms(_SNAPSHOTS.decode(data), _complete)


def encode_log_event(event: LogEvent) -> bytes:
    return msgspec.json.encode(event)


def decode_log_event(data: bytes | str) -> LogEvent:
    """The inverse of `encode_log_event`."""
    return _LOG_EVENTS.decode(data)


def _with_histograms(snapshot: Snapshot, change: Callable[[Histogram], Histogram]) -> Snapshot:
    """The snapshot with every histogram changed, in whichever field it is."""
    changed: dict[str, Any] = {
        field: {name: change(histogram) for name, histogram in getattr(snapshot, field).items()}
        for field in _HISTOGRAMS
    }
    return replace(snapshot, **changed)


def _finite(histogram: Histogram) -> Histogram:
    return replace(histogram, bounds=tuple(bound for bound in histogram.bounds if math.isfinite(bound)))


def _complete(histogram: Histogram) -> Histogram:
    if len(histogram.bounds) == len(histogram.counts):
        return histogram
    return replace(histogram, bounds=(*histogram.bounds, math.inf))
