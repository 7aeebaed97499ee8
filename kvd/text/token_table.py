"""The bytes of every token.

Purpose: detokenizing is then joining bytes, which is exact, incremental and costs one list access per token.
Owner: made once at load, read-only after, so any thread may read it.
Two families of vocabulary are known, told apart by the `decoder` of tokenizer.json:
    byte-level    a token is a string over GPT-2's alphabet of 256 printable characters, one per byte
    sentencepiece "▁" stands for a space and `<0xE4>` for a single byte; a text begins with a "▁" that is not part of it
"""

from __future__ import annotations

import re
from typing import Any

from kvd.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNENCODABLE = "\ufffe"


def _byte_alphabet() -> dict[int, str]:
    """For `str.translate`: GPT-2's character of a byte → the character with the byte's number.

    Characters below 256 that are not in the alphabet map to one that latin-1 cannot encode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, _UNENCODABLE)
    table.update((256 + index, chr(byte)) for index, byte in enumerate(others))
    return table


_ALPHABET = _byte_alphabet()


class TokenTable:
    """`token_bytes[id]` are the bytes of a token as written; ids without a token have none.

    strips_leading_space   the first space of a decoded text is the tokenizer's, not the text's
    """

    def __init__(self, tokenizer: dict[str, Any], vocabulary: dict[int, str], added: dict[int, bool]) -> None:
        """`tokenizer`: the parsed tokenizer.json; `vocabulary`: token of each id, added tokens included;
        `added`: for each added token's id, whether it is special, that is, never shown.

        Raises UnsupportedModel for a decoder of another family.
        """
        steps = _decoder_steps(tokenizer.get("decoder"))
        kinds = {step["type"] for step in steps}
        is_byte_level = "ByteLevel" in kinds
        has_bytes = "ByteFallback" in kinds
        if unknown := kinds - {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}:
            raise UnsupportedModel(f"the tokenizer's decoder {', '.join(sorted(unknown))} is not supported")
        if not is_byte_level and not kinds & {"Metaspace", "Replace"}:
            raise UnsupportedModel("the tokenizer has no decoder that says how tokens become text")
        self.strips_leading_space = any(_strips_space(step) for step in steps)
        num_ids = max(vocabulary, default=-1) + 1
        self.token_bytes: list[bytes] = [b""] * num_ids
        for token_id, token in vocabulary.items():
            if token_id in added:
                data = token.encode()
            elif has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
                data = bytes([int(match[1], 16)])
            elif is_byte_level:
                data = _byte_level_bytes(token)
            else:
                data = token.replace("▁", " ").encode()
            self.token_bytes[token_id] = data
        self._visible = list(self.token_bytes)
        for token_id, is_special in added.items():
            if is_special:
                self._visible[token_id] = b""

    def visible_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text that users see; nothing for special tokens and unknown ids."""
        return self._visible[token_id] if 0 <= token_id < len(self._visible) else b""


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]


def _strips_space(step: dict[str, Any]) -> bool:
    """Whether this step removes the leading space; raises UnsupportedModel for what it cannot stand for."""
    kind = step["type"]
    if kind == "Metaspace":
        if step.get("replacement", "▁") != "▁":
            raise UnsupportedModel("the tokenizer's Metaspace decoder uses another character than ▁")
        scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
        return bool(scheme != "never")
    if kind == "Replace":
        if step.get("pattern") != {"String": "▁"} or step.get("content") != " ":
            raise UnsupportedModel("the tokenizer's decoder replaces something else than ▁ by a space")
        return False
    if kind == "Strip":
        if step.get("content") != " " or step.get("start", 0) > 1 or step.get("stop", 0) != 0:
            raise UnsupportedModel("the tokenizer's decoder strips something else than one leading space")
        return bool(step.get("start", 0) == 1)
    return False
