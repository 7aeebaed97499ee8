"""The bytes of tokens, family by family."""

from __future__ import annotations

from kvd.text.token_table import TokenTable

BYTE_LEVEL = {"decoder": {"type": "ByteLevel"}}
SENTENCEPIECE = {
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
}


def table(tokenizer: dict[str, object], tokens: list[str], added: dict[int, bool] | None = None) -> TokenTable:
    return TokenTable(tokenizer, dict(enumerate(tokens)), added or {})


def test_byte_level_alphabet_covers_every_byte_once() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    made = table(BYTE_LEVEL, sorted(ByteLevel.alphabet())).token_bytes
    assert sorted(made) == [bytes([byte]) for byte in range(256)]
    assert table(BYTE_LEVEL, ["Ġfox", "ä¸Ń", "Ċ"]).token_bytes == [b" fox", "中".encode(), b"\n"]


def test_token_outside_the_alphabet_stands_for_itself() -> None:
    assert table(BYTE_LEVEL, ["a b", "中", "\xad"]).token_bytes == [b"a b", "中".encode(), "\xad".encode()]


def test_sentencepiece_spaces_and_bytes() -> None:
    made = table(SENTENCEPIECE, ["▁fox", "<0xE4>", "<0xe4>", "▁▁", "x▁y", "<0x1>"])
    assert made.token_bytes == [b" fox", b"\xe4", b"\xe4", b"  ", b"x y", b"<0x1>"]
    assert made.strips_leading_space
    assert not table(BYTE_LEVEL, []).strips_leading_space


def test_added_tokens_are_what_they_say_and_special_ones_are_hidden() -> None:
    made = table(BYTE_LEVEL, ["a", "<|é|>", "Ġ"], {1: True, 2: False})
    assert made.token_bytes == [b"a", "<|é|>".encode(), "Ġ".encode()]
    assert [made.visible_bytes(token_id) for token_id in (-1, 0, 1, 2, 3)] == [b"", b"a", b"", "Ġ".encode(), b""]


def test_gaps_in_the_vocabulary_have_no_bytes() -> None:
    assert TokenTable(BYTE_LEVEL, {0: "a", 3: "b"}, {}).token_bytes == [b"a", b"", b"", b"b"]


def test_metaspace_decoder_strips_unless_it_never_prepends() -> None:
    for scheme, strips in (("always", True), ("first", True), ("never", False)):
        decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}
        assert table({"decoder": decoder}, ["▁a"]).strips_leading_space is strips
