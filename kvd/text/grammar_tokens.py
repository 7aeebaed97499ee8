"""A model's vocabulary as grammars see it.

Purpose: llguidance needs the bytes of every token, and how the model itself would write a text that the grammar leaves
no choice about; both come from the tokenizer that encodes prompts, so that there is one truth about tokens.
Owner: made once, read-only after. The tokenizer is called back from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import llguidance

from kvd.text.tokenizer import Tokenizer


class TokenizerForGrammars:
    """`tokens` is llguidance's view of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Iterable[int]) -> None:
        self._control_ids = tokenizer.control_ids
        marks = sorted((text for text in self._control_ids if text), key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        vocabulary = _Vocabulary(tokenizer, sorted(end_token_ids))
        self.tokens = llguidance.LLTokenizer(vocabulary, eos_token=sorted(end_token_ids))  # type: ignore[arg-type]

    def is_control(self, text: str) -> bool:
        """Whether the whole text is one control token."""
        return text in self._control_ids

    def literal(self, text: str) -> str:
        """Lark's expression for a fixed text, in which control tokens are written as such; "" for none."""
        pieces = [text] if self._control is None else self._control.split(text)
        return " ".join(
            f"<[{self._control_ids[piece]}]>" if piece in self._control_ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


class _Vocabulary:
    """What `LLTokenizer` asks of a tokenizer; the names are its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_token_ids: list[int]) -> None:
        self.eos_token_id = end_token_ids[0]
        self.special_token_ids = sorted({*tokenizer.control_ids.values(), *end_token_ids})
        self.tokens = tokenizer.table.token_bytes
        self._tokenizer = tokenizer
        self._ids = {data: token_id for token_id, data in enumerate(self.tokens) if data}
        for token_id in self.special_token_ids:
            if self._ids.get(self.tokens[token_id]) == token_id:
                del self._ids[self.tokens[token_id]]
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly the text's, as the model would write them in the midst of an answer."""
        data = text.encode()
        # A sentencepiece tokenizer puts a space before a text; behind a line it does not.
        for prefix in ("", "\n"):
            ids = self._tokenizer.encode(prefix + text)
            for num_before in range(4):
                if b"".join(self.tokens[each] for each in ids[num_before:]) == data:
                    return ids[num_before:]
        return self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        ids = []
        while data:
            for length in range(min(self._longest, len(data)), 0, -1):
                token_id = self._ids.get(data[:length])
                if token_id is not None:
                    ids.append(token_id)
                    data = data[length:]
                    break
            else:
                return ids  # the vocabulary has no token for this byte; llguidance asks for what can be written
        return ids
