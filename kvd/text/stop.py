"""Finds stop strings in text that arrives in pieces.

Purpose: decide, character by character, how much of the text may be shown.
Owner: the event loop, one matcher per choice.
Rule: the occurrence that is complete first wins; of several that end at the same character the longest. This does
not depend on how the text was cut into pieces, so a streamed answer and a whole one are equal.
Cost: O(1) amortised per character whatever the number and length of the stop strings (Aho and Corasick 1975).
"""

from __future__ import annotations

from collections import deque

from kvd.errors import RequestError

MAX_STOP_CHARACTERS = 65_536
"""All stop strings of one request together."""


class StopMatcher:
    """An automaton over the stop strings; its state is the longest suffix of the text that begins a stop string.

    num_held    how many characters at the end of the text may be the beginning of a stop string
    """

    __slots__ = ("_children", "_depth", "_failure", "_first", "_matched", "_state", "_stop_strings")

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        if sum(map(len, stop_strings)) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop: all stop strings together may have {MAX_STOP_CHARACTERS} characters", param="stop"
            )
        if not all(stop_strings):
            raise RequestError("stop: a stop string must not be empty", param="stop")
        self._stop_strings = stop_strings
        self._first = frozenset(text[0] for text in stop_strings)
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._matched: list[int | None] = [None]  # per state: index of the longest stop string that ends there
        for index, text in enumerate(stop_strings):
            self._insert(index, text)
        self._failure = [0] * len(self._children)
        self._link()
        self._state = 0

    def _insert(self, index: int, text: str) -> None:
        state = 0
        for character in text:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._matched.append(None)
                self._children[state][character] = following
            state = following
        self._matched[state] = index

    def _link(self) -> None:
        """Breadth first: the failure state of a node is shallower, so it is complete when it is read."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self._matched[state] is None:
                self._matched[state] = self._matched[self._failure[state]]
            for character, child in self._children[state].items():
                self._failure[child] = self._next(self._failure[state], character)
                queue.append(child)

    def _next(self, state: int, character: str) -> int:
        while True:
            following = self._children[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._failure[state]

    @property
    def num_held(self) -> int:
        return self._depth[self._state]

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Reads `text`; returns (characters of `text` up to the end of the match, stop string) or None.

        With `armed` false an occurrence that ends in `text` does not count; one that began in it may later.
        """
        if self._state == 0 and self._first.isdisjoint(text):
            return None
        for position, character in enumerate(text, start=1):
            self._state = self._next(self._state, character)
            matched = self._matched[self._state]
            if matched is not None and armed:
                return position, self._stop_strings[matched]
        return None
