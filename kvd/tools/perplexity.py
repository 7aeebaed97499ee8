"""Teacher-forced evaluation through kvd's own decoder, ops and KV cache.

Purpose: numbers that judge what is served (these weights, this arithmetic, this cache format), not a copy of it.
Owner thread: the caller's; a `Scorer` is used by one thread at a time.
Invariant: every window starts with an empty context, and a token is scored once at most, from the logits of the
token before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvd.cache.store import allocate_cache
from kvd.core import BLOCK_SIZE, PlanItem, StepPlan
from kvd.engine.batch_builder import BatchBuilder
from kvd.errors import ConfigError, StartupError
from kvd.model.decoder import Decoder
from kvd.model.files import ModelFiles
from kvd.model.progress import Progress, QuietProgress, Task
from kvd.model.weights import ModelWeights
from kvd_kernels.ops import KVCache, Ops

CHUNK_TOKENS = 128
WINDOW_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Scores:
    """nll: float32 [num_scored], −ln p of each scored token, in text order."""

    nll: torch.Tensor

    @property
    def perplexity(self) -> float:
        return self.nll.double().mean().exp().item()


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far one distribution of next tokens is from another, averaged over the scored tokens.

    mean_kl is KL(reference ‖ other) in nats; top1_agreement the share of tokens with the same argmax.
    """

    num_tokens: int
    mean_kl: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive tokens of one window: rows of logits, and the token that really follows each row.

    logits: float32 [n, vocab], a view that the next chunk overwrites; targets: int64 [n].
    """

    logits: torch.Tensor
    targets: torch.Tensor


class Scorer:
    """One packed model with one cache format, ready to score texts.

    window: tokens of context at most (limited to the model's positions); chunk: tokens per step.
    first_token: put before each window, for models whose prompts start with a BOS token; it is not scored.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        window: int,
        chunk: int = CHUNK_TOKENS,
        first_token: int | None = None,
    ) -> None:
        assert chunk <= min(decoder.max_tokens, decoder.max_seqs), "the decoder needs a logit row per token of a chunk"
        self.decoder = decoder
        self.window = min(window, decoder.spec.max_positions)
        self._cache = cache
        self._chunk = chunk
        self._first_token = first_token
        self._num_blocks = -(-self.window // BLOCK_SIZE)
        assert all(pool.shape[0] >= self._num_blocks for pool in cache.pools), "the cache is smaller than a window"
        self._builder = BatchBuilder(
            len(cache.format.groups), max_tokens=chunk, max_seqs=chunk, max_blocks=self._num_blocks
        )
        self._program = decoder.ops.record(self._builder.batch, cache, partial(decoder.forward, cache=cache))

    def chunks(self, token_ids: Sequence[int]) -> Iterator[_Chunk]:
        """Run the text window by window, and yield what each step computed."""
        prefix = [] if self._first_token is None else [self._first_token]
        stride = self.window - len(prefix)
        for start in range(0, len(token_ids), stride):
            window = prefix + list(token_ids[start : start + stride])
            for first in range(0, len(window) - 1, self._chunk):
                inputs = window[first : min(first + self._chunk, len(window) - 1)]
                targets = window[first + 1 : first + 1 + len(inputs)]
                yield _Chunk(self._forward(inputs, first), torch.tensor(targets, dtype=torch.int64))

    def num_scored(self, num_tokens: int) -> int:
        """How many tokens of a text of that length get a score."""
        unscored = 1 if self._first_token is None else 0
        stride = self.window - 1 + unscored
        return num_tokens - unscored * -(-num_tokens // stride)

    @torch.inference_mode()
    def _forward(self, inputs: list[int], start: int) -> torch.Tensor:
        groups = range(len(self._cache.format.groups))
        item = PlanItem(
            request_id="text",
            slot=0,
            start=start,
            token_ids=tuple(inputs),
            block_tables=tuple(tuple(range(self._num_blocks)) for _ in groups),
            first_positions=tuple(range(0, self._num_blocks * BLOCK_SIZE, BLOCK_SIZE) for _ in groups),
            samples=True,
        )
        batch = self._builder.fill(StepPlan(step_id=0, items=(item,)), [0])
        batch.logit_rows[: len(inputs)] = torch.arange(len(inputs))
        batch.num_logit_rows = len(inputs)
        self._program.run(batch, None)
        return self._program.logits[: len(inputs)]

    def score(self, token_ids: Sequence[int], *, task: Task | None = None) -> Scores:
        """The loss of every token but each window's first. Raises StartupError when logits are not finite."""
        losses = []
        for chunk in self.chunks(token_ids):
            losses.append(_losses(torch.log_softmax(chunk.logits.cpu(), dim=1), chunk.targets))
            if task is not None:
                task.advance(len(chunk.targets))
        return Scores(torch.cat(losses))


def build_scorer(
    weights: ModelWeights,
    ops: Ops,
    kv_cache_dtype: str,
    *,
    window: int = WINDOW_TOKENS,
    chunk: int = CHUNK_TOKENS,
    first_token: int | None = None,
    progress: Progress | None = None,
) -> Scorer:
    """Pack a model and allocate a cache of exactly one window; `kv_cache_dtype` as in `ModelSpec.kv_format`."""
    spec = weights.spec
    window = min(window, spec.max_positions)
    kv_format = spec.kv_format(kv_cache_dtype)
    decoder = Decoder(
        weights, ops, kv_format,
        max_tokens=chunk, max_seqs=chunk, max_positions=window, progress=progress or QuietProgress(),
    )  # fmt: skip
    cache = allocate_cache(kv_format, -(-window // BLOCK_SIZE), ops.device)
    return Scorer(decoder, cache, window=window, chunk=chunk, first_token=first_token)


def kl_divergence(
    reference: Scorer, others: Sequence[Scorer], token_ids: Sequence[int], *, task: Task | None = None
) -> list[Divergence]:
    """How far each of `others` is from `reference`: all run the text side by side, with equal windows and chunks."""
    tallies = [_Tally() for _ in others]
    for steps in zip(*(scorer.chunks(token_ids) for scorer in (reference, *others)), strict=True):
        targets = steps[0].targets
        log_p = torch.log_softmax(steps[0].logits.cpu(), dim=1)
        for tally, step in zip(tallies, steps[1:], strict=True):
            tally.add(log_p, torch.log_softmax(step.logits.cpu(), dim=1), targets)
        if task is not None:
            task.advance(len(targets))
    return [tally.result() for tally in tallies]


@dataclass(slots=True)
class _Tally:
    """What `kl_divergence` collects for one of its scorers, token by token."""

    divergences: list[torch.Tensor] = field(default_factory=list)
    agreements: list[torch.Tensor] = field(default_factory=list)
    reference_losses: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def add(self, log_p: torch.Tensor, log_q: torch.Tensor, targets: torch.Tensor) -> None:
        self.reference_losses.append(_losses(log_p, targets))
        self.losses.append(_losses(log_q, targets))
        self.divergences.append((log_p.exp() * (log_p - log_q)).sum(dim=1))
        self.agreements.append(log_p.argmax(dim=1) == log_q.argmax(dim=1))

    def result(self) -> Divergence:
        divergences = torch.cat(self.divergences)
        return Divergence(
            num_tokens=len(divergences),
            mean_kl=divergences.double().mean().item(),
            top1_agreement=torch.cat(self.agreements).double().mean().item(),
            reference_perplexity=Scores(torch.cat(self.reference_losses)).perplexity,
            perplexity=Scores(torch.cat(self.losses)).perplexity,
        )


def _losses(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = -log_probabilities.gather(1, targets[:, None])[:, 0]
    if not bool(torch.isfinite(losses).all()):
        raise StartupError("the model's logits are not finite on this text: its weights or activations overflow")
    return losses


def read_text(name: str) -> str:
    """A text that ships with kvd: "calibration" or "evaluation"."""
    return (resources.files("kvd.tools") / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def tokenize(files: ModelFiles, text: str) -> list[int]:
    """Token ids of a text without any BOS; the spelling of a control token is plain text."""
    tokenizer = Tokenizer.from_file(str(files.tokenizer_json))
    tokenizer.encode_special_tokens = True
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def first_token_of(files: ModelFiles) -> int | None:
    """What every window starts with, as every prompt of this model does."""
    return files.bos_token_id if files.adds_bos else None


def load_tokens(files: ModelFiles, text: Path | None, num_tokens: int | None) -> list[int]:
    """Tokens of a file (of the evaluation text when None), `num_tokens` at most; ConfigError when unusable."""
    if text is None:
        name, content = "the evaluation text", read_text("evaluation")
    else:
        name = str(text)
        try:
            content = text.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{text}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{text}: not a UTF-8 text ({error.reason} at byte {error.start})") from error
    token_ids = tokenize(files, content)[:num_tokens]
    if len(token_ids) < 2:
        raise ConfigError(f"{name}: {len(token_ids)} tokens; at least 2 are needed to score one")
    return token_ids
