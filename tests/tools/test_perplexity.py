"""The scorer against a forward pass in one piece, and `kvd eval` on tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvd.errors import ConfigError, StartupError
from kvd.model.progress import QuietProgress
from kvd.tools import eval as evaluation
from kvd.tools import perplexity
from kvd.tools.perplexity import build_scorer, kl_divergence
from kvd.tools.wrapped_ops import FloatLinearOps
from kvd_kernels.registry import create_ops
from tests.model.checkpoints import load_reference, make_awq, make_llama, rewrite_json, rewrite_tensors
from tests.tools.conftest import load

TOKENS = [(7 * index * index + 3 * index) % 317 + 3 for index in range(100)]


def test_losses_are_those_of_transformers(tmp_path: Path, home: Path) -> None:
    path = make_llama(tmp_path / "model")
    _, weights = load(path, home, head_int8=False)
    scorer = build_scorer(weights, create_ops("cpu"), "fp16", window=48, chunk=20)
    scores = scorer.score(TOKENS)
    model = load_reference(path)
    expected = []
    for start in (0, 48, 96):
        window = torch.tensor(TOKENS[start : start + 48])
        with torch.no_grad():
            log_probabilities = model(window[None]).logits[0].log_softmax(1)
        expected.append(-log_probabilities[:-1].gather(1, window[1:, None])[:, 0])
    assert len(scores.nll) == scorer.num_scored(len(TOKENS)) == 97
    torch.testing.assert_close(scores.nll, torch.cat(expected), atol=5e-3, rtol=0)
    assert scores.perplexity == pytest.approx(torch.cat(expected).mean().exp().item(), rel=1e-3)


@pytest.mark.parametrize("num_tokens", [2, 47, 48, 49, 96, 97, 100])
@pytest.mark.parametrize("first_token", [None, 0])
def test_every_token_is_scored_once(tmp_path: Path, home: Path, num_tokens: int, first_token: int | None) -> None:
    _, weights = load(make_llama(tmp_path / "model", num_hidden_layers=1), home)
    scorer = build_scorer(weights, create_ops("cpu"), "int8", window=48, chunk=32, first_token=first_token)
    targets = torch.cat([chunk.targets for chunk in scorer.chunks(TOKENS[:num_tokens])]).tolist()
    if first_token is None:
        assert targets == [token for index, token in enumerate(TOKENS[:num_tokens]) if index % 48]
    else:
        assert targets == TOKENS[:num_tokens]
    assert len(targets) == scorer.num_scored(num_tokens)


def test_chunks_do_not_change_a_bit(tmp_path: Path, home: Path) -> None:
    _, weights = load(make_llama(tmp_path / "model"), home)
    ops = create_ops("cpu")
    losses = [build_scorer(weights, ops, "int8", window=64, chunk=chunk).score(TOKENS).nll for chunk in (7, 64)]
    assert torch.equal(*losses)


def test_divergence_of_a_model_from_itself_is_zero(tmp_path: Path, home: Path) -> None:
    _, weights = load(make_llama(tmp_path / "model"), home)
    ops = create_ops("cpu")
    first, second = (build_scorer(weights, ops, "fp16", window=64, chunk=32) for _ in range(2))
    (result,) = kl_divergence(first, [second], TOKENS)
    assert result.mean_kl == 0
    assert result.top1_agreement == 1
    assert result.perplexity == result.reference_perplexity


def test_divergence_is_the_definition(tmp_path: Path, home: Path) -> None:
    ops = create_ops("cpu")
    scorers = []
    for seed in (1, 2):
        _, weights = load(make_llama(tmp_path / f"model{seed}", seed=seed), home)
        scorers.append(build_scorer(weights, ops, "fp16", window=64, chunk=64))
    p, q = (torch.cat([chunk.logits.double().softmax(1) for chunk in s.chunks(TOKENS)]) for s in scorers)
    (result,) = kl_divergence(scorers[0], scorers[1:], TOKENS)
    assert result.num_tokens == len(p) == 98
    assert result.mean_kl == pytest.approx((p * (p / q).log()).sum(1).mean().item(), rel=1e-4)
    assert result.top1_agreement == pytest.approx((p.argmax(1) == q.argmax(1)).double().mean().item())


def test_logits_that_overflow_are_an_error(tmp_path: Path, home: Path) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_tensors(path, model__layers__0__input_layernorm__weight=torch.full((128,), 3e38))
    _, weights = load(path, home)
    scorer = build_scorer(weights, create_ops("cpu"), "fp16", window=64, chunk=64)
    with pytest.raises(StartupError, match="not finite"):
        scorer.score(TOKENS)


def test_texts_share_no_paragraph_and_are_long_enough() -> None:
    calibration, text = perplexity.read_text("calibration"), perplexity.read_text("evaluation")
    shared = set(calibration.split("\n\n")) & set(text.split("\n\n"))
    assert shared <= {""}
    assert len(calibration) > 10_000
    assert len(text) > 10_000


def run_eval(path: Path, home: Path, **changes: object) -> evaluation.EvalReport:
    settings = {"kv_cache_dtype": "auto", "text": None, "num_tokens": 64} | changes
    return evaluation.run(str(path), home=home, progress=QuietProgress(), **settings)  # type: ignore[arg-type]


def test_eval_judges_the_cache_apart_from_the_arithmetic(tmp_path: Path, home: Path) -> None:
    report = run_eval(make_awq(tmp_path / "model"), home)
    assert report.kv_cache_dtype == "int8"
    assert report.arithmetic == "a8"
    assert report.served.num_tokens == 63
    assert report.cache is not None
    assert 0 < report.cache.mean_kl < 0.002
    assert report.served.mean_kl > 2 * report.cache.mean_kl
    assert report.served.reference_perplexity == report.cache.reference_perplexity
    assert report.passes_gate
    assert "passes the gate" in report.lines()[2]
    assert report.as_dict()["passes_gate"] is True


def test_eval_of_16_bits_has_no_cache_to_judge(tmp_path: Path, home: Path) -> None:
    report = run_eval(make_awq(tmp_path / "model"), home, kv_cache_dtype="fp16")
    assert report.cache is None
    assert report.passes_gate is None
    assert report.served.mean_kl > 0
    assert len(report.lines()) == 2


def test_float_linears_are_the_exact_weights(tmp_path: Path, home: Path) -> None:
    """An AWQ model with its linears in float32 is transformers' model with the dequantised weights."""
    path = make_awq(tmp_path / "model", base="qwen2")
    _, weights = load(path, home, head_int8=False)
    scorer = build_scorer(weights, FloatLinearOps(create_ops("cpu")), "fp16", window=64, chunk=64)
    logits = next(iter(scorer.chunks(TOKENS[:64]))).logits
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor([TOKENS[:63]])).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=0)


def test_eval_reads_a_text_file_and_starts_windows_with_bos(tmp_path: Path, home: Path) -> None:
    path = make_llama(tmp_path / "model")
    rewrite_json(path / "tokenizer_config.json", add_bos_token=True)
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 4)
    report = run_eval(path, home, text=text, num_tokens=None)
    files, _ = load(path, home)
    assert files.adds_bos
    assert report.served.num_tokens == len(perplexity.tokenize(files, text.read_text()))
    assert str(text) in report.lines()[0]


def test_control_tokens_in_a_text_are_text(tmp_path: Path, home: Path) -> None:
    files, _ = load(make_llama(tmp_path / "model"), home)
    assert 2 not in perplexity.tokenize(files, "a<|im_end|>b")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "0 tokens; at least 2"), (b"ab\xff\xfe", "not a UTF-8 text")],
)
def test_unusable_texts_are_one_line(tmp_path: Path, home: Path, content: bytes | None, message: str) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        run_eval(make_llama(tmp_path / "model"), home, text=text)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "fp8_e4m3"}, {"num_tokens": 1}])
def test_unusable_settings_are_one_line(tmp_path: Path, home: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3|--tokens 1"):
        run_eval(tmp_path, home, **settings)
