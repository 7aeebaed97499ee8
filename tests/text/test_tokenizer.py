"""Encoding: like the library for ordinary text, and control tokens nowhere but where they are put."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from kvd.errors import CheckpointError, ContextLengthExceeded, RequestError, UnsupportedModel
from kvd.text import TextModel
from kvd.text.tokenizer import Tokenizer

ORDINARY = [
    "",
    " ",
    "The quick brown fox",
    "  indented\n    more\n\n\nend  ",
    "日本語 and 😀 and 👨‍👩‍👧‍👦",
    "a < b | c > d <h1>title</h1> [INST] </x>",
    "\x00\x01 control characters \x7f",
]


def library(path: Path) -> Library:
    return Library.from_file(str(path))


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_encoded_as_by_the_library(any_tokenizer: Path, text: str) -> None:
    expected = library(any_tokenizer).encode(text, add_special_tokens=False).ids
    assert Tokenizer(any_tokenizer).encode(text) == expected


@pytest.fixture(scope="module")
def loaded(byte_level: Path, legacy_sentencepiece: Path, metaspace: Path) -> list[tuple[Tokenizer, Library]]:
    return [(Tokenizer(path), library(path)) for path in (byte_level, legacy_sentencepiece, metaspace)]


@given(data=st.data())
def test_any_text_is_encoded_as_by_the_library(loaded: list[tuple[Tokenizer, Library]], data: st.DataObject) -> None:
    ours, theirs = data.draw(st.sampled_from(loaded))
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@given(data=st.data())
def test_control_tokens_in_place_are_encoded_as_by_the_library(
    loaded: list[tuple[Tokenizer, Library]], data: st.DataObject
) -> None:
    """Spaces and words around them too: families differ in what they put after a control token."""
    ours, theirs = data.draw(st.sampled_from(loaded))
    control = sorted(ours.control.all)
    parts = data.draw(st.lists(st.sampled_from([*control, "fox", " jumps ", "\n", " ", "日本", "    "]), max_size=12))
    text, spans = "", []
    for part in parts:
        if part in control:
            spans.append((len(text), len(text) + len(part)))
        text += part
    assert ours.encode(text, spans) == theirs.encode(text, add_special_tokens=False).ids


def test_typed_control_tokens_are_text_and_come_back_as_text(any_tokenizer: Path) -> None:
    tokenizer = Tokenizer(any_tokenizer)
    reference = library(any_tokenizer)
    for token in sorted(tokenizer.control.hidden):
        for text in (token, f"a {token} b", f"{token}{token}", f"x{token}"):
            ids = tokenizer.encode(text)
            assert reference.token_to_id(token) not in ids
            if token != "<unk>":
                assert (
                    TextModel(
                        any_tokenizer, chat_template=None, adds_bos=False, bos_token_id=None, special_tokens={}
                    ).decode(ids)
                    == text
                )


def test_which_added_tokens_are_control_tokens(byte_level: Path) -> None:
    """Special ones, and others that the template writes; not runs of spaces, not HTML."""
    special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert Tokenizer(byte_level).control.all == special
    assert Tokenizer(byte_level, template_text="… <think>\n …").control.all == special | {"<think>"}


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(source.read_text())
    change(content)
    target.write_text(json.dumps(content))
    return target


def test_a_token_of_control_form_is_one_even_when_not_marked_special(byte_level: Path, tmp_path: Path) -> None:
    def unmark(content: dict[str, Any]) -> None:
        for token in content["added_tokens"]:
            token["special"] = False

    path = rewrite(byte_level, tmp_path / "tokenizer.json", unmark)
    assert Tokenizer(path).control.all == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_merges_cannot_form_a_control_token(byte_level: Path, tmp_path: Path) -> None:
    def add_merge(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        vocab["<s>"] = len(vocab) + len(content["added_tokens"])
        vocab["<s"] = len(vocab) + len(content["added_tokens"])
        content["model"]["merges"] = [["<", "s"], ["<s", ">"], *content["model"]["merges"]]
        content["pre_tokenizer"]["use_regex"] = False
        token = dict(content["added_tokens"][0], id=vocab["<s>"], content="<s>")
        content["added_tokens"].append(token)

    path = rewrite(byte_level, tmp_path / "tokenizer.json", add_merge)
    control_id = library(path).token_to_id("<s>")
    tokenizer = Tokenizer(path)
    assert tokenizer.encode("a<s>b", [(1, 4)]).count(control_id) == 1
    assert control_id not in tokenizer.encode("a<s>b")


def test_truncation_padding_and_dropout_of_the_file_are_off(byte_level: Path, tmp_path: Path) -> None:
    plain = Tokenizer(byte_level).encode("The quick brown fox jumps over")
    noisy = library(byte_level)
    noisy.enable_truncation(3)
    noisy.enable_padding(length=64)
    noisy.save(str(tmp_path / "noisy.json"))
    path = rewrite(tmp_path / "noisy.json", tmp_path / "tokenizer.json", lambda c: c["model"].update(dropout=0.9))
    assert Tokenizer(path).encode("The quick brown fox jumps over") == plain


def test_unpaired_surrogate_is_refused(byte_level: Path) -> None:
    with pytest.raises(RequestError, match="surrogate") as refusal:
        Tokenizer(byte_level).encode("a\ud800b")
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"model": {"type": "Nope", "vocab": {}}}']
)
def test_unreadable_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises((CheckpointError, UnsupportedModel)) as refusal:
        Tokenizer(path)
    if isinstance(refusal.value, CheckpointError):
        assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.json: No such file"):
        Tokenizer(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace("_", " ")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip("x", 1, 0)]),
        decoders.Metaspace(replacement="_"),
    ],
)
def test_decoder_of_another_family_is_refused(tmp_path: Path, decoder: Any) -> None:
    tokenizer = Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="decoder"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_added_token_whose_id_the_library_would_not_give_is_refused(byte_level: Path, tmp_path: Path) -> None:
    def shift(content: dict[str, Any]) -> None:
        content["added_tokens"].append(dict(content["added_tokens"][0], id=9000, content="<|far|>"))

    with pytest.raises(CheckpointError, match=r"<\|far\|>.*9000"):
        Tokenizer(rewrite(byte_level, tmp_path / "tokenizer.json", shift))


# --------------------------------------------------------------------------- BOS


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompt_has_bos_once_whatever_the_post_processor_does(any_tokenizer: Path, adds_bos: bool) -> None:
    reference = library(any_tokenizer)
    bos = reference.token_to_id("<s>") or reference.token_to_id("<|endoftext|>")
    assert bos is not None
    text_model = TextModel(any_tokenizer, chat_template=None, adds_bos=adds_bos, bos_token_id=bos, special_tokens={})
    for text in ("", "fox", reference.id_to_token(bos), reference.id_to_token(bos) + " fox"):
        ids = text_model.encode_prompt(text)
        assert ids.count(bos) == adds_bos
        assert not adds_bos or ids[0] == bos


def test_long_text_is_encoded_as_by_the_library(any_tokenizer: Path) -> None:
    text = "The quick brown fox, 日本語. " * 300
    assert Tokenizer(any_tokenizer).encode(text) == library(any_tokenizer).encode(text, add_special_tokens=False).ids


def test_of_an_endless_text_only_the_beginning_is_encoded(any_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory follows the limit: tokens of the whole text would take thousands of times its own bytes."""
    monkeypatch.setattr("kvd.text.tokenizer._EXACT_CHARACTERS", 4000)
    ours, text = Tokenizer(any_tokenizer), "The fox. " * 10_000
    num_tokens = len(ours.encode(text))
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens") as refused:
        ours.encode(text, limit_tokens=100)
    assert 100 <= refused.value.extra["n_prompt_tokens"] < 4000
    with pytest.raises(ContextLengthExceeded):
        ours.encode(text, limit_tokens=num_tokens // 8)
    # Near the limit, on either side of it, the answer is the tokens themselves.
    assert len(ours.encode(text, limit_tokens=num_tokens)) == num_tokens
    assert len(ours.encode(text, limit_tokens=num_tokens - 1)) == num_tokens
