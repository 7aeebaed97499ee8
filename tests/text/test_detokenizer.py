"""Streamed text: joined it is the whole text, and it never shows half of anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvd.text import OutputStream, TextModel

TEXTS = [
    "Hello, world",
    "two  inner  spaces and one at the end ",
    "emoji 😀 family 👨‍👩‍👧‍👦 flag 🏳️‍🌈 skin 👍🏽 end",
    "日本語と中文、한국어",
    "\n\nnew lines\tand tabs\r\n",
    "e\u0301 combining, \u200d joiner alone, \ufffd itself",
]
STOPS: list[tuple[str, ...]] = [(), ("END",), ("\n\n", "fox"), ("本語", "the lazy"), ("👧",), (" ",), ("a", "ab", "b")]


def model(path: Path) -> TextModel:
    return TextModel(path, chat_template=None, adds_bos=False, bos_token_id=None, special_tokens={})


def stream(output: OutputStream, ids: list[int], group: int = 1) -> list[str]:
    pieces = [output.push(ids[start : start + group]) for start in range(0, len(ids), group)]
    return [*pieces, output.finish()]


@pytest.fixture(scope="module")
def models(byte_level: Path, legacy_sentencepiece: Path, metaspace: Path) -> list[tuple[TextModel, Tokenizer]]:
    return [(model(path), Tokenizer.from_file(str(path))) for path in (byte_level, legacy_sentencepiece, metaspace)]


@given(data=st.data())
def test_joined_pieces_equal_decode_of_all_ids(models: list[tuple[TextModel, Tokenizer]], data: st.DataObject) -> None:
    text_model, _ = data.draw(st.sampled_from(models))
    ids = data.draw(st.lists(st.integers(0, text_model.vocab_size + 3), max_size=40))
    group = data.draw(st.integers(1, 5))
    pieces = stream(text_model.open_output(), ids, group)
    assert "".join(pieces) == text_model.decode(ids)


@given(data=st.data())
def test_decode_equals_the_library_on_byte_level_tokens(
    models: list[tuple[TextModel, Tokenizer]], data: st.DataObject
) -> None:
    """Except for an incomplete end, which the library shows as U+FFFD."""
    text_model, tokenizer = models[0]
    ids = data.draw(st.lists(st.integers(0, text_model.vocab_size - 1), max_size=40))
    theirs = tokenizer.decode(ids, skip_special_tokens=True)
    ours = text_model.decode(ids)
    assert theirs in (ours, ours + "\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_is_exact_and_free_of_replacement(any_tokenizer: Path, text: str) -> None:
    text_model = model(any_tokenizer)
    ids = text_model.encode_prompt(text)
    assert text_model.decode(ids) == text
    pieces = stream(text_model.open_output(), ids)
    assert "".join(pieces) == text
    assert text == Tokenizer.from_file(str(any_tokenizer)).decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("family", ["byte_level", "legacy_sentencepiece"])
def test_leading_spaces_of_the_text_survive(request: pytest.FixtureRequest, family: str) -> None:
    """Not so with Metaspace, which itself drops one when it encodes."""
    text_model = model(request.getfixturevalue(family))
    assert text_model.decode(text_model.encode_prompt("  two")) == "  two"


@pytest.mark.parametrize("text", TEXTS[1:5])
def test_cut_in_the_middle_of_a_character_shows_no_replacement(any_tokenizer: Path, text: str) -> None:
    text_model = model(any_tokenizer)
    ids = text_model.encode_prompt(text)
    assert any(len(text_model.token_bytes(id_)) > 0 for id_ in ids)
    for length in range(len(ids) + 1):
        visible = "".join(stream(text_model.open_output(), ids[:length]))
        assert text.startswith(visible)
        assert visible == text_model.decode(ids[:length])


def test_invalid_bytes_become_replacement_only_when_they_cannot_become_valid(byte_level: Path) -> None:
    text_model = model(byte_level)
    byte_id = {text_model.token_bytes(id_): id_ for id_ in reversed(range(text_model.vocab_size))}
    output = text_model.open_output()
    assert output.push([byte_id[b"\xf0"]]) == ""
    assert output.push([byte_id[b"\x9f"]]) == ""
    assert output.push([byte_id[b"a"]]) == "\ufffda"
    assert output.push([byte_id[b"\xff"]]) == "\ufffd"
    assert output.push([byte_id[b"\xe4"]]) == ""
    assert output.finish() == ""


def test_special_tokens_are_not_shown_and_other_added_tokens_are(byte_level: Path) -> None:
    text_model = model(byte_level)
    tokenizer = Tokenizer.from_file(str(byte_level))
    ids = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<think>", "</think>", "<|im_end|>")]
    assert "".join(stream(text_model.open_output(), ids)) == "<think></think>" == text_model.decode(ids)
    assert text_model.token_bytes(ids[0]) == b"<|im_start|>"
    assert text_model.token_bytes(text_model.vocab_size) == b""
    assert text_model.token_bytes(-1) == b""


def test_only_the_first_leading_space_is_the_tokenizers(legacy_sentencepiece: Path) -> None:
    text_model = model(legacy_sentencepiece)
    ids = text_model.encode_prompt("quick fox")
    assert text_model.token_bytes(ids[0]).startswith(b" ")
    assert "".join(stream(text_model.open_output(), ids)) == "quick fox"
    assert "".join(stream(text_model.open_output(continues_text=True), ids)) == " quick fox"
    assert "".join(stream(text_model.open_output(), ids + ids)) == "quick fox quick fox"


# --------------------------------------------------------------------------- stop strings


def cut_at_stop(text: str, stops: tuple[str, ...], *, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOPS)
def test_stop_cuts_the_same_text_however_tokens_are_grouped(
    any_tokenizer: Path, stops: tuple[str, ...], include: bool
) -> None:
    text_model = model(any_tokenizer)
    for text in [*TEXTS, "The quick brown fox\n\njumps EN over the lazy ENDING abab"]:
        ids = text_model.encode_prompt(text)
        visible, stop = cut_at_stop(text, stops, include=include)
        for group in (1, 2, 7, len(ids)):
            output = text_model.open_output(stops, include_stop=include)
            assert "".join(stream(output, ids, group)) == visible
            assert output.stopped == (stop is not None)
            assert output.stop_string == stop


def test_possible_beginning_is_held_back_and_released(byte_level: Path) -> None:
    text_model = model(byte_level)
    output = text_model.open_output(("STOP",))
    shown = [output.push(text_model.encode_prompt(part)) for part in ("abc S", "T", "O", "x ST", "OP rest", "more")]
    assert shown == ["abc ", "", "", "STOx ", "", ""]
    assert output.stopped
    assert output.stop_string == "STOP"
    assert output.finish() == ""


def test_finish_releases_what_was_no_stop_string(byte_level: Path) -> None:
    text_model = model(byte_level)
    output = text_model.open_output(("STOP",))
    assert output.push(text_model.encode_prompt("abc STO")) == "abc "
    assert output.finish() == "STO"
    assert not output.stopped
    assert output.finish() == ""


def test_stop_inside_the_bytes_of_a_character(byte_level: Path) -> None:
    """No token holds the stop string: its bytes are spread over several."""
    text_model = model(byte_level)
    ids = [id_ for byte in "x🤖y".encode() for id_ in byte_ids(text_model, byte)]
    output = text_model.open_output(("🤖",))
    assert "".join(stream(output, ids)) == "x"
    assert output.stop_string == "🤖"
    assert output.num_tokens == 5


def byte_ids(text_model: TextModel, byte: int) -> list[int]:
    return [next(id_ for id_ in range(text_model.vocab_size) if text_model.token_bytes(id_) == bytes([byte]))]


def test_num_tokens_ends_at_the_token_that_completed_the_stop(byte_level: Path) -> None:
    text_model = model(byte_level)
    before, after = text_model.encode_prompt("one STOP"), text_model.encode_prompt(" two three")
    output = text_model.open_output(("STOP",))
    assert output.push(before + after) == "one "
    assert output.num_tokens == len(before)


def test_stop_within_min_tokens_is_text(byte_level: Path) -> None:
    text_model = model(byte_level)
    ids = text_model.encode_prompt("a STOP b STOP c")
    first = len(text_model.encode_prompt("a STOP"))
    output = text_model.open_output(("STOP",), min_tokens=first)
    assert "".join(stream(output, ids)) == "a STOP b "


# --------------------------------------------------------------------------- text per token, for logprobs


@given(data=st.data())
def test_token_texts_joined_equal_the_visible_text(
    models: list[tuple[TextModel, Tokenizer]], data: st.DataObject
) -> None:
    text_model, _ = data.draw(st.sampled_from(models))
    random_ids = st.lists(st.integers(0, text_model.vocab_size - 1), max_size=30)
    real_ids = st.sampled_from(TEXTS).map(text_model.encode_prompt)
    ids = data.draw(random_ids | real_ids)
    stops = data.draw(st.sampled_from(STOPS))
    group = data.draw(st.integers(1, 5))
    include = data.draw(st.booleans())
    output = text_model.open_output(stops, include_stop=include, track_tokens=True)
    shown = ""
    tokens = []
    for start in range(0, len(ids), group):
        shown += output.push(ids[start : start + group])
        tokens += output.take_tokens()
        assert shown.startswith("".join(token.text for token in tokens))
    shown += output.finish()
    tokens += output.take_tokens()
    assert "".join(token.text for token in tokens) == shown
    assert [token.position for token in tokens] == list(range(len(tokens)))
    assert [token.token_id for token in tokens] == ids[: len(tokens)]
    if not output.stopped:
        assert len(tokens) == len(ids)
        assert b"".join(token.data for token in tokens).decode(errors="replace").rstrip("\ufffd") == shown.rstrip(
            "\ufffd"
        )


def test_token_texts_do_not_change_the_text(byte_level: Path) -> None:
    text_model = model(byte_level)
    ids = text_model.encode_prompt("The quick brown fox 😀 jumps")
    for stops in STOPS:
        plain = stream(text_model.open_output(stops), ids)
        tracked = stream(text_model.open_output(stops, track_tokens=True), ids)
        assert plain == tracked


def test_token_cut_by_a_stop_keeps_its_visible_part(byte_level: Path) -> None:
    text_model = model(byte_level)
    ids = text_model.encode_prompt("the quick")
    inside = next(id_ for id_ in ids if len(text_model.token_bytes(id_)) >= 2)
    piece = text_model.token_bytes(inside).decode()
    output = text_model.open_output((piece[1:],), track_tokens=True)
    assert output.push([inside]) == piece[0]
    assert [(token.text, token.data) for token in output.take_tokens()] == [(piece[0], piece[0].encode())]
