"""Which lengths to serve: what requests looked like so far, and what that says about settings. Torch-free; pure.

Advice about max_model_len covers the 99th percentile of prompt and answer together, and a fifth more; advice about
max_num_seqs fills the KV cache with requests of the 90th.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvd.cache.fitting import AUTO_MAX_NUM_SEQS, Fit
from kvd.core import BLOCK_SIZE
from kvd.geometry import HOST_SETTING, Geometry
from kvd.views import Histogram

EXPECTED_MARGIN = 1.2
"""How much longer than the lengths that are expected max_model_len should be."""
TYPICAL_TOKENS = 2048
"""What a request is taken to be like where nobody says."""
MOST_SEQS_DEVICE = 256
"""More at a time are not advised: the steps of a device get no cheaper per token from there on."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of token counts. is_at_least: the 99th lies beyond the last bucket, of which this is where it begins."""

    p50: int
    p90: int
    p99: int
    is_at_least: bool = False


@dataclass(frozen=True, slots=True)
class SeenLengths:
    """What requests looked like since the start."""

    num_requests: int
    prompt: Percentiles
    answer: Percentiles

    def total(self, name: str) -> int:
        """Prompt and answer together. name: "p50", "p90" or "p99"."""
        return int(getattr(self.prompt, name)) + int(getattr(self.answer, name))


def seen_lengths(histograms: Mapping[str, Histogram]) -> SeenLengths | None:
    """From a snapshot's histograms; None where no request has ended yet."""
    prompts, answers = (histograms.get(f"request_{name}_tokens") for name in ("prompt", "generation"))
    if prompts is None or answers is None or not prompts.total or not answers.total:
        return None
    return SeenLengths(answers.total, _percentiles(prompts), _percentiles(answers))


def _percentiles(histogram: Histogram) -> Percentiles:
    values = [_quantile(histogram, fraction) for fraction in (0.5, 0.9, 0.99)]
    p50, p90, p99 = (math.ceil(value) for value, _ in values)
    return Percentiles(p50, p90, p99, values[-1][1])


def _quantile(histogram: Histogram, fraction: float) -> tuple[float, bool]:
    """Interpolated inside its bucket; in the one without an upper bound its lower bound, and True."""
    rank = fraction * histogram.total
    index = next(index for index, count in enumerate(histogram.counts) if count >= rank)
    lower = histogram.bounds[index - 1] if index else 0.0
    if index >= len(histogram.bounds) or math.isinf(histogram.bounds[index]):
        return lower, True
    below = histogram.counts[index - 1] if index else 0
    return lower + (histogram.bounds[index] - lower) * (rank - below) / (histogram.counts[index] - below), False


def recommended_len(expected_tokens: int, max_positions: int) -> int:
    """max_model_len for requests of so many tokens: a fifth more, in whole blocks, at most what the model knows."""
    whole = math.ceil(round(expected_tokens * EXPECTED_MARGIN, 6) / BLOCK_SIZE) * BLOCK_SIZE
    return max(1, min(whole, max_positions))


@dataclass(frozen=True, slots=True)
class Advice:
    """expected_tokens: what one request is taken to have. max_model_len None: nothing speaks for one."""

    max_model_len: int | None
    max_num_seqs: int
    expected_tokens: int


def advise(geometry: Geometry, fitted: Fit, seen: SeenLengths | None, asked_tokens: int | None = None) -> Advice:
    """For requests of asked_tokens, else of the lengths that were seen, else of typical ones."""
    longest = geometry.shape.max_positions
    length: int | None = None
    if asked_tokens is not None:
        expected = asked_tokens
        length = recommended_len(asked_tokens, longest) if asked_tokens <= longest else None
    elif seen is not None:
        expected, length = seen.total("p90"), recommended_len(seen.total("p99"), longest)
    else:
        expected = min(TYPICAL_TOKENS, fitted.largest_len or TYPICAL_TOKENS)
    most = AUTO_MAX_NUM_SEQS if geometry.room.setting == HOST_SETTING else MOST_SEQS_DEVICE
    count = fitted.requests(min(expected, max(1, fitted.largest_len)))
    return Advice(length, max(1, min(most, count)), expected)
