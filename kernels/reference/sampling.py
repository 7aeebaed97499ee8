"""Choosing tokens: bias, penalties, ban, mask, temperature, truncation, one Philox number per row.

Row by row in float64, so that a token depends on its own logits and parameters alone. Candidates are sorted only
as deep as the draw needs. Engine thread; stateless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvd_kernels.ops import SamplingBatch, SamplingResult
from kvd_kernels.reference.philox import uniform

Row = npt.NDArray[np.float64]

_FIRST_CANDIDATES = 256
_CANDIDATE_GROWTH = 16


@dataclass(frozen=True, slots=True)
class Truncation:
    """What of the distribution stays: the k best (0: all), then the top_p mass of these, then min_p · best."""

    top_k: int
    top_p: float
    min_p: float


def best(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Ids of the `count` largest values, falling, equal ones by rising id."""
    count = min(count, values.shape[0])
    if count < values.shape[0]:
        threshold = np.partition(values, values.shape[0] - count)[values.shape[0] - count]
        ids = np.flatnonzero(values >= threshold)
    else:
        ids = np.arange(values.shape[0])
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def adjust(logits: npt.NDArray[np.float32], params: SamplingBatch, row: int) -> Row:
    """Bias, penalties, ban and mask applied to a float64 copy of one row.

    Repetition (CTRL, arXiv 1909.05858) divides positive and multiplies negative logits of every token of prompt
    and output; presence and frequency subtract for output tokens.
    """
    values = logits.astype(np.float64)
    if not params.has_ragged:
        return values
    bias, prompt, output = params.bias[row], params.prompt_counts[row], params.output_counts[row]
    banned, mask = params.banned[row], params.masks[row]
    if bias is not None:
        np.add.at(values, bias[0].numpy(), bias[1].double().numpy())
    repetition = float(params.repetition[row])
    if repetition != 1.0:
        seen = [counts[0].numpy() for counts in (prompt, output) if counts is not None]
        if seen:
            ids = np.unique(np.concatenate(seen))
            picked = values[ids]
            values[ids] = np.where(picked > 0, picked / repetition, picked * repetition)
    if output is not None:
        ids, counts = output[0].numpy(), output[1].double().numpy()
        values[ids] -= float(params.presence[row]) * (counts > 0) + float(params.frequency[row]) * counts
    if banned is not None:
        values[banned.numpy()] = -np.inf
    if mask is not None:
        allowed = np.unpackbits(mask.numpy().view(np.uint8), count=values.shape[0], bitorder="little")
        values[allowed == 0] = -np.inf
    return values


def draw(values: Row, truncation: Truncation, number: float) -> int:
    """Inverse transform sampling over candidates by falling probability, then id.

    values: logits after temperature (-inf: impossible); number in [0, 1).
    """
    vocab_size = values.shape[0]
    limit = min(truncation.top_k, vocab_size) if truncation.top_k > 0 else vocab_size
    peak = values.max()
    if limit == vocab_size:
        total = float(np.exp(values - peak).sum())
    else:
        total = float(np.exp(values[best(values, limit)] - peak).sum())
    count = min(_FIRST_CANDIDATES, limit)
    while True:
        ids = best(values, count)
        probabilities = np.exp(values[ids] - peak)  # relative to the best, which is 1
        cumulative = np.cumsum(probabilities)
        # A candidate stays while the mass before it has not reached top_p, and while it is likely enough.
        stays = (cumulative - probabilities < truncation.top_p * total) & (probabilities >= truncation.min_p)
        stays &= probabilities > 0
        stays[0] = True
        num_kept = int(np.argmin(stays)) if not stays.all() else count
        if num_kept < count or count == limit:
            mass = float(cumulative[num_kept - 1])
            break
        if truncation.top_p >= 1.0 and truncation.min_p <= 0.0 and number * total < cumulative[-1]:
            num_kept, mass = count, total
            break
        count = min(limit, count * _CANDIDATE_GROWTH)
    chosen = int(np.searchsorted(cumulative[:num_kept], number * mass, side="right"))
    return int(ids[min(chosen, num_kept - 1)])


def log_softmax(logits: npt.NDArray[np.float32]) -> Row:
    """Natural logarithms of the distribution of one row."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Row = shifted - np.log(np.exp(shifted).sum())
    return result


def sample(logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
    """One token per live row; see the ops contract."""
    token_ids: list[int | None] = []
    logprobs: list[tuple[float, list[tuple[int, float]]] | None] = []
    for row in range(params.num_rows):
        raw: npt.NDArray[np.float32] = logits[row].numpy()
        if not np.isfinite(raw).all():
            token_ids.append(None)
            logprobs.append(None)
            continue
        adjusted = adjust(raw, params, row)
        temperature = float(params.temperature[row])
        if temperature == 0.0:
            token_id = int(np.argmax(adjusted))  # the first of equal maxima
        else:
            truncation = Truncation(int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]))
            number = uniform(int(params.seeds[row]), int(params.positions[row]))
            token_id = draw(adjusted / temperature, truncation, number)
        token_ids.append(token_id)
        wanted = int(params.num_logprobs[row])
        if wanted < 0:
            logprobs.append(None)
            continue
        distribution = log_softmax(raw)
        top = [(int(i), float(distribution[i])) for i in best(raw, wanted)] if wanted else []
        logprobs.append((float(distribution[token_id]), top))
    return SamplingResult(token_ids, logprobs)
