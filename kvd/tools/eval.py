"""`kvd eval`: how well a model predicts a text, and what its arithmetic and its KV cache format cost.

Purpose: perplexity as served, and the distance from the model's exact weights with a 16-bit cache: of what is served,
and of the cache format alone, which is the gate that every default format must pass.
Owner thread: the caller's.
Invariant: all sides see the same weights and the same chunks. The cache format is judged with linears in float32:
the noise of int8 activations is larger than what a good format costs, and would drown it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvd.engine.backend import log_to_stderr, open_cpu_ops
from kvd.errors import ConfigError
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import Progress
from kvd.tools import perplexity
from kvd.tools.perplexity import Divergence
from kvd.tools.wrapped_ops import FloatLinearOps
from kvd_kernels.ops import Ops

REFERENCE_KV_DTYPE = "fp16"
EVALUATED_KV_DTYPES = ("auto", "int8", "fp16", "bf16")
LARGEST_MEAN_KL = 0.002
LARGEST_PERPLEXITY_CHANGE = 0.003


@dataclass(frozen=True, slots=True)
class EvalReport:
    """`served`: arithmetic and cache as `kvd serve` uses them; `cache`: float32 linears with the judged cache format.

    Both are compared with float32 linears and a 16-bit cache. `cache` is None when the judged format is that one.
    """

    model: str
    text: str
    kv_cache_dtype: str
    arithmetic: str
    window: int
    served: Divergence
    cache: Divergence | None

    @property
    def passes_gate(self) -> bool | None:
        """Whether the cache format is close enough to 16 bits; None when there was nothing to compare."""
        return None if self.cache is None else is_close(self.cache)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"passes_gate": self.passes_gate}

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.model}: perplexity {self.served.perplexity:.3f} as served ({self.arithmetic} arithmetic, "
            f"{self.kv_cache_dtype} KV cache), {self.served.reference_perplexity:.3f} in float32 with a 16-bit "
            f"KV cache, over {self.served.num_tokens} tokens of {self.text} in contexts up to {self.window} tokens",
            f"as served: {_distance(self.served)}",
        ]
        if self.cache is not None:
            verdict = "passes" if self.passes_gate else "FAILS"
            lines.append(
                f"the {self.kv_cache_dtype} KV cache alone: {_distance(self.cache)}, perplexity "
                f"{self.cache.perplexity:.3f}: {verdict} the gate (KL at most {LARGEST_MEAN_KL}, perplexity within "
                f"{LARGEST_PERPLEXITY_CHANGE:.1%})"
            )
        return lines


def is_close(divergence: Divergence) -> bool:
    """The gate: what a default format may cost, at every context length."""
    change = abs(divergence.perplexity / divergence.reference_perplexity - 1)
    return divergence.mean_kl <= LARGEST_MEAN_KL and change <= LARGEST_PERPLEXITY_CHANGE


def _distance(divergence: Divergence) -> str:
    return f"KL {divergence.mean_kl:.6f} per token, same top token {divergence.top1_agreement:.1%}"


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
    ops = open_cpu_ops("auto", None, log_to_stderr)
    floats = FloatLinearOps(ops)
    window = min(window, spec.max_positions)
    first_token = perplexity.first_token_of(files)

    def scorer(backend: Ops, dtype: str) -> perplexity.Scorer:
        return perplexity.build_scorer(
            weights, backend, dtype, window=window, first_token=first_token, progress=progress
        )

    sides = [scorer(ops, kv_cache_dtype)]
    if kv_cache_dtype != REFERENCE_KV_DTYPE:
        sides.append(scorer(floats, kv_cache_dtype))
    reference = scorer(floats, REFERENCE_KV_DTYPE)
    with progress.task("Scoring", reference.num_scored(len(token_ids)), "tokens") as task:
        results = perplexity.kl_divergence(reference, sides, token_ids, task=task)
    name = "the built-in evaluation text" if text is None else str(text)
    cache = results[1] if len(results) > 1 else None
    return EvalReport(source, name, kv_cache_dtype, ops.arithmetic, window, results[0], cache)
