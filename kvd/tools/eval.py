"""`kvd eval`: how well a model predicts a text, and what its KV cache format costs.

Purpose: perplexity under the format that is served, and its distance from a 16-bit cache: the gate that every
default format must pass.
Owner thread: the caller's.
Invariant: both formats see the same weights, the same arithmetic and the same chunks, so that only the cache differs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvd.errors import ConfigError
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import Progress
from kvd.tools import perplexity
from kvd_kernels.registry import create_ops

REFERENCE_KV_DTYPE = "fp16"
EVALUATED_KV_DTYPES = ("auto", "int8", "fp16", "bf16")

# What every default format must keep to, at every context length.
LARGEST_MEAN_KL = 0.002
LARGEST_PERPLEXITY_CHANGE = 0.003


@dataclass(frozen=True, slots=True)
class EvalReport:
    """mean_kl, top1_agreement and perplexity_16bit are None when the cache that was measured is the 16-bit one."""

    model: str
    text: str
    kv_cache_dtype: str
    num_tokens: int
    window: int
    perplexity: float
    perplexity_16bit: float | None = None
    mean_kl: float | None = None
    top1_agreement: float | None = None

    @property
    def passes_gate(self) -> bool | None:
        """Whether the cache format is close enough to 16 bits; None when there was nothing to compare."""
        if self.mean_kl is None or self.perplexity_16bit is None:
            return None
        change = abs(self.perplexity / self.perplexity_16bit - 1)
        return self.mean_kl <= LARGEST_MEAN_KL and change <= LARGEST_PERPLEXITY_CHANGE

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"passes_gate": self.passes_gate}

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.model}: perplexity {self.perplexity:.3f} over {self.num_tokens} tokens of {self.text}, "
            f"contexts up to {self.window} tokens, {self.kv_cache_dtype} KV cache"
        ]
        if self.mean_kl is not None and self.perplexity_16bit is not None and self.top1_agreement is not None:
            verdict = "passes" if self.passes_gate else "FAILS"
            lines.append(
                f"against a 16-bit KV cache: perplexity {self.perplexity_16bit:.3f}, KL {self.mean_kl:.6f} per token, "
                f"same top token {self.top1_agreement:.1%}: {verdict} the gate (KL at most {LARGEST_MEAN_KL}, "
                f"perplexity within {LARGEST_PERPLEXITY_CHANGE:.1%})"
            )
        return lines


def run(
    source: str,
    *,
    kv_cache_dtype: str,
    text: Path | None,
    num_tokens: int | None,
    home: Path,
    progress: Progress,
    revision: str | None = None,
    window: int = perplexity.WINDOW_TOKENS,
) -> EvalReport:
    """Evaluate `source` (anything that `model:` accepts) on a text file, or on the evaluation text when None.

    kv_cache_dtype: the format to judge. num_tokens: use the first so many tokens. window: longest context.
    Raises ConfigError for a format that cannot be evaluated here or a text that is too short.
    """
    if kv_cache_dtype not in EVALUATED_KV_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype}: expected one of {', '.join(EVALUATED_KV_DTYPES)}")
    if num_tokens is not None and num_tokens < 2:
        raise ConfigError(f"--tokens {num_tokens}: at least 2 are needed to score one")
    kv_cache_dtype = "int8" if kv_cache_dtype == "auto" else kv_cache_dtype
    files = resolve_model(source, home=home, revision=revision, progress=progress)
    spec = read_spec(files)
    token_ids = perplexity.load_tokens(files, text, num_tokens)
    weights = load_weights(files, spec, progress=progress)
    ops = create_ops("reference")
    window = min(window, spec.max_positions)
    first_token = perplexity.first_token_of(files)

    def scorer(dtype: str) -> perplexity.Scorer:
        return perplexity.build_scorer(weights, ops, dtype, window=window, first_token=first_token, progress=progress)

    judged = scorer(kv_cache_dtype)
    total = judged.num_scored(len(token_ids))
    name = "the built-in evaluation text" if text is None else str(text)
    if kv_cache_dtype == REFERENCE_KV_DTYPE:
        with progress.task("Scoring", total, "tokens") as task:
            value = judged.score(token_ids, task=task).perplexity
        return EvalReport(source, name, kv_cache_dtype, total, window, value)
    reference = scorer(REFERENCE_KV_DTYPE)
    with progress.task("Scoring with both caches", total, "tokens") as task:
        result = perplexity.kl_divergence(reference, judged, token_ids, task=task)
    return EvalReport(
        source, name, kv_cache_dtype, total, window,
        result.perplexity, result.reference_perplexity, result.mean_kl, result.top1_agreement,
    )  # fmt: skip
