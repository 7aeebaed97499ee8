"""Small tokenizers of each family, trained in the test process; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

settings.register_profile("text", deadline=None, derandomize=True)
settings.load_profile("text")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again. ",
    "def main(arguments: list[str]) -> int:\n    return len(arguments)\n",
    "Größe, naïveté, œuvre, Łódź, Привет мир, Γειά σου Κόσμε",
    "日本語のテキストを生成します。中文分词测试。한국어 문장입니다.",
    "emoji 😀😃😄 family 👨‍👩‍👧‍👦 flag 🏳️‍🌈 thumbs 👍🏽",
    "<user> said: a < b > c | d, [INST] and <|x|> are just characters <h1>title</h1>",
]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_byte_level() -> Tokenizer:
    """Like SmolLM2's and Qwen's: byte-level BPE; `<think>` and a run of spaces are added but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "    ", "<h1>")])
    return tokenizer


def train_sentencepiece(*, legacy: bool) -> Tokenizer:
    """Like Llama 2's: BPE with byte fallback over text whose spaces are ▁.

    `legacy`: the normalizer prepends ▁ after every control token; else a Metaspace pre-tokenizer does, at the start.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=70, show_progress=False
    )
    tokenizer.train_from_iterator(list(CORPUS[:2] * 4), trainer)
    content = tokenizer.to_str()
    tokenizer = Tokenizer.from_str(_only_three_added(content))
    if not legacy:
        tokenizer.normalizer = None  # type: ignore[assignment]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _only_three_added(content: str) -> str:
    """The trainer made the byte tokens added tokens; in real files they are vocabulary."""
    parsed = json.loads(content)
    parsed["added_tokens"] = parsed["added_tokens"][:3]
    return json.dumps(parsed)


def add_bos_post_processor(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    bos_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    train_byte_level().save(str(path))
    return path


@pytest.fixture(scope="session")
def byte_level_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte_level_bos") / "tokenizer.json"
    add_bos_post_processor(train_byte_level(), "<|endoftext|>").save(str(path))
    return path


@pytest.fixture(scope="session")
def legacy_sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("legacy_sentencepiece") / "tokenizer.json"
    add_bos_post_processor(train_sentencepiece(legacy=True), "<s>").save(str(path))
    return path


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    train_sentencepiece(legacy=False).save(str(path))
    return path


@pytest.fixture(params=["byte_level", "byte_level_bos", "legacy_sentencepiece", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates in the manner of SmolLM2 (chatml), Llama 2, Llama 3 and Qwen, written for these tests."""
    return {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
