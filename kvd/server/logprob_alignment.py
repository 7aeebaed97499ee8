"""Log probabilities of an answer whose text is only a part of what the model wrote. One per choice, event loop only.

Invariant: the tokens handed out with text parts, joined, are the text of these parts. A token of which only a piece is
text appears with that piece; tokens of reasoning, markers and calls do not appear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from kvd.server.logprobs import TokenLogprob
from kvd.text.parts import Finish, Part, TextDelta


class LogprobAlignment:
    """Places are characters since the beginning of what the model wrote."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, TokenLogprob]] = deque()  # where each token begins
        self._num_characters = 0
        self._start = self._end = 0  # of the text known to be without a gap

    def align(self, parts: Iterable[Part], logprobs: Iterable[TokenLogprob]) -> tuple[Part, ...]:
        """The parts of one wake-up with the tokens that they complete."""
        for entry in logprobs:
            self._queue.append((self._num_characters, entry))
            self._num_characters += len(entry.chosen.token)
        aligned: list[Part] = []
        has_ended = False
        for part in parts:
            if isinstance(part, TextDelta):
                if part.start != self._end:
                    self._add_late(aligned, self._take(is_closed=True))
                    self._start = part.start
                self._end = part.start + len(part.text)
                aligned.append(replace(part, logprobs=self._take()))
                continue
            if isinstance(part, Finish):
                has_ended = True
                self._add_late(aligned, self._take(is_closed=True, is_last=True))
            aligned.append(part)
        if not has_ended:
            self._add_late(aligned, self._take())
        return tuple(aligned)

    def _add_late(self, aligned: list[Part], entries: tuple[TokenLogprob, ...]) -> None:
        """Tokens whose text has been handed out already."""
        if entries:
            aligned.append(TextDelta("", self._end, entries))

    def _take(self, *, is_closed: bool = False, is_last: bool = False) -> tuple[TokenLogprob, ...]:
        """`is_closed`: no text follows without a gap, so a token that goes on is cut. `is_last`: none at all follows.

        A token without text has the first bytes of the next character, or of one that is never completed.
        """
        taken = []
        while self._queue:
            start, entry = self._queue[0]
            end = start + len(entry.chosen.token)
            is_empty = start == end
            if start < self._start if is_empty else end <= self._start:
                self._queue.popleft()
                continue
            if start > self._end or (start == self._end and not (is_empty and is_last)):
                break
            if end > self._end and not is_closed:
                break
            self._queue.popleft()
            taken.append(_cut(entry, max(0, self._start - start), self._end - start))
        return tuple(taken)


def _cut(entry: TokenLogprob, start: int, end: int) -> TokenLogprob:
    chosen = entry.chosen
    if start <= 0 and end >= len(chosen.token):
        return entry
    text = chosen.token[start:end]
    return replace(entry, chosen=replace(chosen, token=text, token_bytes=text.encode()))
