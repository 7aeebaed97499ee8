"""Log probabilities of tokens, cut to the text that the client sees.

One tracker per choice, event loop only. Invariant: the token strings handed out so far, joined, are a
prefix of the visible text, and after the last call they are exactly that text. Logarithms are natural;
minus infinity, which JSON cannot say, becomes −9999.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd.core import Logprobs
from kvd.text.detokenizer import OutputStream, TokenText
from kvd.text.text_model import TextModel

LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token that was, or could have been, sampled: its text, its bytes, its log probability."""

    token: str
    token_bytes: bytes
    logprob: float

    def to_json(self) -> dict[str, Any]:
        return {"token": self.token, "logprob": self.logprob, "bytes": list(self.token_bytes)}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and the best alternatives, best first."""

    chosen: TokenChoice
    top: tuple[TokenChoice, ...]


class LogprobTracker:
    """Pairs the log probabilities of one choice with its tokens' share of the visible text."""

    def __init__(self, text: TextModel, output: OutputStream, *, tells_stop_token: bool = False) -> None:
        """`output` is the choice's own detokenizer, opened with `track_tokens`.

        tells_stop_token: a stop token is reported, too, with the text "" that it has.
        """
        self._text = text
        self._output = output
        self._tells_stop_token = tells_stop_token
        self._pending: deque[Logprobs] = deque()  # of tokens pushed but not taken yet, in order
        self._ends: list[TokenLogprob] = []

    def add(self, logprobs: Logprobs | None) -> None:
        """Take note of the token that is pushed next."""
        assert logprobs is not None, "the engine gives log probabilities to whoever asked for them"
        self._pending.append(logprobs)

    def add_stop(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Take note of the stop token that ends the output, which is not pushed."""
        if self._tells_stop_token:
            assert logprobs is not None, "the engine gives log probabilities to whoever asked for them"
            self._ends.append(pair(self._text, TokenText(self._output.num_tokens, token_id, "", b""), logprobs))

    def take(self) -> list[TokenLogprob]:
        """The tokens whose text became visible since the last call; after the end, all that belong to the text."""
        taken = [pair(self._text, token, self._pending.popleft()) for token in self._output.take_tokens()]
        taken += self._ends
        self._ends.clear()
        return taken


def pair(text: TextModel, token: TokenText, logprobs: Logprobs) -> TokenLogprob:
    """One token of a text with what the engine says of it."""
    chosen = TokenChoice(token.text, token.data, _finite(logprobs.token_logprob))
    top = (chosen if other == token.token_id else _alternative(text, other, value) for other, value in logprobs.top)
    return TokenLogprob(chosen, tuple(top))


def _alternative(text: TextModel, token_id: int, logprob: float) -> TokenChoice:
    token_bytes = text.token_bytes(token_id)
    return TokenChoice(token_bytes.decode("utf-8", "replace"), token_bytes, _finite(logprob))


def _finite(logprob: float) -> float:
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN becomes the lowest, too


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or of one of its chunks."""
    content = [
        {**entry.chosen.to_json(), "top_logprobs": [choice.to_json() for choice in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob], first_offset: int) -> dict[str, Any]:
    """The `logprobs` object of a completion; `first_offset` is where the first token begins in the whole
    text.
    """
    offsets, offset = [], first_offset
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.chosen.token)
    return {
        "tokens": [entry.chosen.token for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [_best_by_text(entry) for entry in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(
    text: TextModel, tokens: Sequence[TokenText], logprobs: Sequence[Logprobs | None]
) -> dict[str, Any]:
    """The `logprobs` object of a completion's prompt; of what nothing comes before, nothing is known.

    tokens: of the whole prompt, from a detokenizer of its own.
    """
    first, *rest = tokens
    assert logprobs[0] is None, "the first token of a prompt has no probability"
    known = [(token, entry) for token, entry in zip(rest, logprobs[1:], strict=True) if entry is not None]
    assert len(known) == len(rest), "of the first token alone nothing is known"
    answer = completion_logprobs([pair(text, token, entry) for token, entry in known], len(first.text))
    for key, value in (("tokens", first.text), ("token_logprobs", None), ("top_logprobs", None), ("text_offset", 0)):
        answer[key].insert(0, value)
    return answer


def _best_by_text(entry: TokenLogprob) -> dict[str, float]:
    """Text → log probability, the sampled token included; of tokens with equal text the likeliest stays."""
    table: dict[str, float] = {}
    for choice in (*entry.top, entry.chosen):
        table[choice.token] = max(choice.logprob, table.get(choice.token, LOWEST_LOGPROB))
    return table
