"""From token ids to text that can be shown, token by token.

Purpose: UTF-8 is never split, a stop string is never shown in part, control tokens are never shown.
Owner: the event loop, one `OutputStream` per choice.
Invariant: all pieces that `push` and `finish` return, joined, equal `TextModel.decode` of all ids up to the stop
string, however the ids were grouped into calls.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvd.text.stop import StopMatcher
from kvd.text.token_table import TokenTable

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(NamedTuple):
    """One token's share of the visible text: the `text` fields of all tokens, joined, equal the visible text.

    A character whose bytes come in several tokens belongs to the last of them; the others have the text "".
    `data` are the token's own bytes, as clients get them beside a logprob.
    """

    position: int  # among the pushed tokens
    token_id: int
    text: str
    data: bytes


class OutputStream:
    """The text of one choice while it is generated.

    stopped      a stop string was completed: nothing more becomes visible, further tokens are ignored
    stop_string  which one
    num_tokens   tokens taken into account; after a stop that is up to the token that completed it
    """

    __slots__ = (
        "_decoder", "_held", "_include_stop", "_matcher", "_min_tokens", "_num_shown_of_head", "_shown",
        "_shown_token_ids", "_strips_space", "_table", "_unshown", "num_tokens", "stop_string", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        table: TokenTable,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        continues_text: bool = False,
        track_tokens: bool = False,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`continues_text`: keep the leading space that a sentencepiece model's first word carries.

        `min_tokens`: a stop string completed within that many tokens is ordinary text.
        `track_tokens`: `take_tokens` will be used; it costs a little per token.
        `shown_token_ids`: special tokens that appear in the text nevertheless, for whoever parses it.
        """
        self._table = table
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = _new_utf8_decoder("replace")
        self._strips_space = table.strips_leading_space and not continues_text
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self._shown_token_ids = shown_token_ids
        self._unshown: deque[TokenText] | None = deque() if track_tokens else None
        self._shown: list[TokenText] = []
        self._num_shown_of_head = 0  # characters of the first unshown token that are visible already
        self.num_tokens = 0
        self.stopped = False
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became visible with these tokens; may be empty."""
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            data = self._table.visible_bytes(token_id)
            if token_id in self._shown_token_ids:
                data = self._table.token_bytes[token_id]
            if self._strips_space and data:
                self._strips_space = False
                data = data.removeprefix(b" ")
            text = self._decoder.decode(data) if data else ""
            if self._unshown is not None:
                self._unshown.append(TokenText(self.num_tokens, token_id, text, data))
            self.num_tokens += 1
            if text or self._unshown is not None:
                pieces.append(self._release(text))
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held back, when no stop string came. An incomplete last character is dropped."""
        if self.stopped:
            return ""
        text, self._held = self._held, ""
        self._show(len(text))
        if self._unshown:
            self._shown.extend(self._unshown)
            self._unshown.clear()
        return text

    def take_tokens(self) -> list[TokenText]:
        """Tokens that became visible in full since the last call; joined they are the text returned so far.

        A token that the beginning of a stop string cuts appears with the part before it, and one wholly inside
        the stop string not at all.
        """
        assert self._unshown is not None, "opened without track_tokens"
        taken, self._shown = self._shown, []
        return taken

    def _release(self, text: str) -> str:
        matcher = self._matcher
        if matcher is None:
            self._show(len(text))
            return text
        match = matcher.feed(text, armed=self.num_tokens > self._min_tokens)
        text, num_before = self._held + text, len(self._held)
        if match is None:
            num_visible = len(text) - matcher.num_held
            self._held = text[num_visible:]
        else:
            num_read, self.stop_string = match
            self.stopped = True
            self._held = ""
            num_visible = num_before + num_read
            if not self._include_stop:
                num_visible -= len(self.stop_string)
        self._show(num_visible)
        return text[:num_visible]

    def _show(self, num_characters: int) -> None:
        """Moves the tokens that these characters complete from unshown to shown.

        A token without text waits for the next one with text: it may hold the first bytes of its character.
        """
        unshown = self._unshown
        if unshown is None:
            return
        self._num_shown_of_head += num_characters
        num_complete = 0
        for position, token in enumerate(unshown, start=1):
            if token.text:
                if len(token.text) > self._num_shown_of_head:
                    break
                self._num_shown_of_head -= len(token.text)
                num_complete = position
        self._shown.extend(unshown.popleft() for _ in range(num_complete))
        if self.stopped:
            self._cut(unshown)

    def _cut(self, unshown: deque[TokenText]) -> None:
        """After a stop: the token in which the visible text ends keeps its visible part, the rest goes."""
        while self._num_shown_of_head:
            token = unshown.popleft()
            if token.text:
                visible = token.text[: self._num_shown_of_head]
                token = token._replace(text=visible, data=visible.encode())
                self._num_shown_of_head = 0
            self._shown.append(token)
        unshown.clear()
