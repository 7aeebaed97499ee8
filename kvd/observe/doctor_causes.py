"""Why a prompt missed the cache: compares it with the remembered ones and names one cause.

Owner: the doctor's thread. The order in which causes are tried, and what each means, stands in docs/doctor.md.

Lost tokens are those behind the cached ones, but for the last one of the prompt, which is always computed, that lie in
a passage of at least `PASSAGE_TOKENS` that a remembered prompt of the same salt has too; or that are known to have been
evicted; or to be the beginning of a prompt of another salt, where that is the cause; or that differ from an earlier
prompt in white space alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.core import BLOCK_SIZE
from kvd.insight import Admission, MissCause
from kvd.observe.doctor_memory import PromptMemory, Remembered
from kvd.observe.doctor_passages import (
    PASSAGE_TOKENS,
    TOKEN_BYTES,
    Pace,
    Passage,
    align,
    common_length,
    decode_ids,
    num_moved,
    num_tokens,
    part,
    union_length,
)

LINE_TOKENS = 64
"""Longest part of a line that may change from request to request and still be a volatile line."""

FIRST_TOKENS = 64
"""A prompt that differs before this token, and in more than a line, has another system prompt."""

MAX_ALIKE = 1024
"""Earlier prompts that are looked at to count those that differ at the same place."""

_LINE_BEGIN_TOKENS = 48
_LINE_REACH_TOKENS, _REACH_TOKENS = 256, 4096
_MAX_PEERS = 8
_CONTINUATION_TOKENS = 8
_CUT_TOKENS = 4  # of the end of an earlier prompt, where a template writes it otherwise in the history
_SHOWN_BEFORE_TOKENS, _SHOWN_TOKENS = 48, 160
_WHITE_SPACE_TOKENS = (64, 512, 4096)
_WHITE_SPACE_CHARACTERS = 64

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a miss was, and what is shown of it when somebody asks: tokens of ours and theirs, around the place.

    place: what makes misses of one cause the same finding, -1 where all are. peer_seconds: since the earlier request
    was admitted, where there is one.
    """

    cause: MissCause
    lost_tokens: int
    position: int = -1
    num_alike: int = 0
    place: int = -1
    is_elsewhere: bool = False
    peer_seconds: float = 0.0
    ours: bytes = b""
    theirs: bytes = b""


class _Prompt:
    """A prompt, and what the memory has to say about it."""

    def __init__(self, memory: PromptMemory, admission: Admission, data: bytes, decode: Decode, pace: Pace) -> None:
        self.memory, self.admission, self.data, self.decode, self.pace = memory, admission, data, decode, pace
        self.salt = admission.cache_salt
        self.limit = max(0, num_tokens(data) - 1)
        self.cached = min(admission.num_cached_tokens, self.limit)
        self.nearest, length = memory.longest_beginning(self.salt, data)
        self.same = min(length, self.limit)
        least = max(self.same, self.cached) + PASSAGE_TOKENS
        self.foreign, self.foreign_length = memory.beginning_elsewhere(self.salt, data, least)
        self.matches = list(memory.matches(self.salt, data, self.cached, pace))
        self.intervals = [(match.passage.ours, match.passage.end) for match in self.matches]
        if admission.evicted is not None:
            self.intervals.append((self.cached, self.cached + admission.evicted.num_tokens))

    def lost(self, *more: tuple[int, int]) -> int:
        return union_length([*self.intervals, *more], self.cached, self.limit)

    def text(self, data: bytes, begin: int, end: int) -> str:
        return self.decode(decode_ids(part(data, begin, end)))

    def diagnosis(
        self, cause: MissCause, lost: int, position: int = -1, peer: Remembered | None = None, **more: int | bool
    ) -> Diagnosis:
        """Shows the prompt and its peer from a little before `position` on; where there is none, from `cached` on."""
        begin = max(0, (position if position >= 0 else self.cached) - _SHOWN_BEFORE_TOKENS)
        theirs = b"" if peer is None else part(peer.data, begin, begin + _SHOWN_TOKENS)
        seconds = 0.0 if peer is None else max(0.0, self.admission.time - peer.time)
        ours = part(self.data, begin, begin + _SHOWN_TOKENS)
        values: dict[str, object] = {"ours": ours, "theirs": theirs, "peer_seconds": seconds, **more}
        return Diagnosis(cause, lost, position, **values)  # type: ignore[arg-type]


def diagnose(memory: PromptMemory, admission: Admission, data: bytes, decode: Decode, pace: Pace) -> Diagnosis | None:
    """The miss of a request, whose prompt is `data`; None: it computed no more than it had to.

    Changes nothing but which remembered prompts were used last.
    """
    prompt = _Prompt(memory, admission, data, decode, pace)
    lost = prompt.lost()
    behind = prompt.same - prompt.cached
    if admission.other_format:
        return prompt.diagnosis("other_format", lost)
    if admission.evicted is not None and lost:
        return prompt.diagnosis("evicted", lost)
    if behind >= BLOCK_SIZE and prompt.same >= PASSAGE_TOKENS:
        return prompt.diagnosis("evicted", lost, peer=prompt.nearest)
    if prompt.foreign is not None:
        lost = prompt.lost((prompt.cached, prompt.foreign_length))
        return prompt.diagnosis("other_salt", lost, peer=prompt.foreign)
    if white := _white_space(prompt):
        return white
    if lost <= max(0, behind):
        return _too_little(prompt, lost, behind)
    return _compare(prompt, lost)


def _too_little(prompt: _Prompt, lost: int, behind: int) -> Diagnosis | None:
    if behind > 0:
        return prompt.diagnosis("too_short", lost, prompt.same, prompt.nearest, num_alike=1)
    if prompt.cached < min(BLOCK_SIZE, prompt.limit):
        return prompt.diagnosis("new", 0)
    return None


def _white_space(prompt: _Prompt) -> Diagnosis | None:
    """Ours and the nearest go on alike, but for white space."""
    peer, at = prompt.nearest, prompt.same
    if peer is None or at + 1 >= prompt.limit or at + 1 >= num_tokens(peer.data):
        return None
    ours = theirs = ""
    for size in _WHITE_SPACE_TOKENS:
        prompt.pace()
        ours, theirs = prompt.text(prompt.data, at, at + size), prompt.text(peer.data, at, at + size)
        bare_ours, bare_theirs = "".join(ours.split()), "".join(theirs.split())
        length = _common_characters(bare_ours, bare_theirs)
        least = min(_WHITE_SPACE_CHARACTERS, len(bare_ours), len(bare_theirs))
        if length < least or ours[: len(theirs)] == theirs[: len(ours)]:
            return None
        if length < min(len(bare_ours), len(bare_theirs)):
            break
    if length < _WHITE_SPACE_CHARACTERS or not _first_differs_in_white_space(ours, theirs):
        return None
    equal = _tokens_of(prompt, at, size, length)
    lost = prompt.lost((at, at + equal))
    return prompt.diagnosis("white_space", lost, at, peer, num_alike=1)


def _first_differs_in_white_space(ours: str, theirs: str) -> bool:
    at = _common_characters(ours, theirs)
    return ours[at : at + 1].isspace() or theirs[at : at + 1].isspace()


def _common_characters(ours: str, theirs: str) -> int:
    """Length of the common beginning, by halves."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokens_of(prompt: _Prompt, begin: int, size: int, num_characters: int) -> int:
    """How many tokens from `begin` on have at most that many characters that are not white space."""
    low, high = 0, min(size, prompt.limit - begin)
    while low < high:
        middle = (low + high + 1) // 2
        if len("".join(prompt.text(prompt.data, begin, begin + middle).split())) <= num_characters:
            low = middle
        else:
            high = middle - 1
    return low


# --------------------------------------------------------------------------- comparing with one earlier prompt


def _compare(prompt: _Prompt, lost: int) -> Diagnosis:
    """Reuse ended where no remembered prompt goes on as ours does, yet passages behind that are known."""
    peer, same, passages = _peer(prompt)
    moved = num_moved([Passage(0, 0, same), *passages])
    if same < prompt.cached - BLOCK_SIZE or not passages:
        # Another prompt has more of the beginning, and this one the rest.
        return _elsewhere(prompt, peer, "reordered" if moved >= PASSAGE_TOKENS else "differs", lost)
    first = passages[0] = _behind(passages[0], same)
    if first.theirs < same or any(passage.theirs + PASSAGE_TOKENS <= first.theirs for passage in passages):
        return prompt.diagnosis("reordered", lost, same, peer, num_alike=1)
    is_line = _is_line(prompt, peer, same, first)
    if is_line:
        begin = _line_begin(prompt, same)
        num_alike, position = _alike(prompt, begin, first, _LINE_REACH_TOKENS)
        if num_alike > 1:
            return prompt.diagnosis("volatile_line", lost, position, peer, num_alike=num_alike, place=begin)
    is_dropped = 4 * (first.ours - same) <= first.theirs - same
    if _continues(prompt, peer, passages) and (is_dropped or (same >= FIRST_TOKENS and not is_line)):
        return prompt.diagnosis("history_rewritten", lost, same, peer, num_alike=1)
    if moved >= PASSAGE_TOKENS:
        return prompt.diagnosis("reordered", lost, same, peer, num_alike=1)
    num_alike, _ = _alike(prompt, same, first, _REACH_TOKENS)
    cause: MissCause = "system_prompt" if same < FIRST_TOKENS else "differs"
    place = same // FIRST_TOKENS if cause == "differs" else -1
    return prompt.diagnosis(cause, lost, same, peer, num_alike=max(1, num_alike), place=place)


def _behind(passage: Passage, same: int) -> Passage:
    """Without what lies in the common beginning of theirs, where enough of it goes on behind: something was put in.

    What was put in often ends as the beginning does, with the end of a line say.
    """
    over = same - passage.theirs
    if over <= 0 or passage.length - over < PASSAGE_TOKENS:
        return passage
    return Passage(passage.ours + over, same, passage.length - over)


def _peer(prompt: _Prompt) -> tuple[Remembered, int, list[Passage]]:
    """The remembered prompt that has most of ours, its beginning included; how long that is, and what it has behind."""
    credit: dict[int, int] = {}
    records: dict[int, Remembered] = {}
    for match in prompt.matches:
        records[match.record.serial] = match.record
        credit[match.record.serial] = credit.get(match.record.serial, 0) + match.num_new
    best = sorted(credit, key=lambda serial: (credit[serial], serial), reverse=True)[:_MAX_PEERS]
    lengths = {serial: common_length(prompt.data, records[serial].data) for serial in best}
    nearest = prompt.nearest
    if nearest is not None and nearest.serial not in lengths:
        # Newer prompts hide it from the index.
        passages = align(prompt.data, nearest.data, prompt.same, prompt.pace)
        if passages:
            records[nearest.serial], lengths[nearest.serial] = nearest, prompt.same
            credit[nearest.serial] = union_length(
                [(each.ours, each.end) for each in passages], prompt.cached, prompt.limit
            )
    chosen = max(lengths, key=lambda it: (min(lengths[it], prompt.cached) + credit[it], lengths[it], it))
    peer, same = records[chosen], lengths[chosen]
    return peer, same, align(prompt.data, peer.data, same, prompt.pace)


def _elsewhere(prompt: _Prompt, peer: Remembered, cause: MissCause, lost: int) -> Diagnosis:
    """The passage stands after another beginning; what is shown is the passage."""
    passage = next(match.passage for match in prompt.matches if match.record is peer)
    begin = max(0, passage.ours - _SHOWN_BEFORE_TOKENS), max(0, passage.theirs - _SHOWN_BEFORE_TOKENS)
    return Diagnosis(
        cause,
        lost,
        prompt.same,
        1,
        is_elsewhere=True,
        peer_seconds=max(0.0, prompt.admission.time - peer.time),
        ours=part(prompt.data, begin[0], begin[0] + _SHOWN_TOKENS),
        theirs=part(peer.data, begin[1], begin[1] + _SHOWN_TOKENS),
    )


def _is_line(prompt: _Prompt, peer: Remembered, same: int, first: Passage) -> bool:
    """What differs before the first common passage is within a line, in both prompts."""
    if max(first.ours, first.theirs) - same > LINE_TOKENS:
        return False
    texts = prompt.text(prompt.data, same, first.ours), prompt.text(peer.data, same, first.theirs)
    return not any("\n" in text.strip() for text in texts)


def _line_begin(prompt: _Prompt, position: int) -> int:
    """Where the line that token `position` is in begins, as far as that is near."""
    least = max(0, position - _LINE_BEGIN_TOKENS)
    for at in range(position, least, -1):
        if "\n" in prompt.text(prompt.data, at - 1, at):
            return at
    return least


def _alike(prompt: _Prompt, begin: int, first: Passage, reach: int) -> tuple[int, int]:
    """Earlier requests that are like ours up to `begin` and have the passage as well, but differ in between.

    reach: how many tokens behind `begin` the passage may end. Returns how many there are, and the first token at which
    one of them differs.
    """
    # Not from its first token on: with one prompt it may begin earlier than with others.
    at = first.ours + min(PASSAGE_TOKENS, first.length - PASSAGE_TOKENS)
    tail = part(prompt.data, at, at + PASSAGE_TOKENS)
    number, position = 0, first.ours
    for record in prompt.memory.beginning_with(prompt.salt, prompt.data, begin, MAX_ALIKE):
        if record.data.find(tail, begin * TOKEN_BYTES, (begin + reach) * TOKEN_BYTES) < 0:
            continue
        prompt.pace()
        length = common_length(prompt.data, record.data, begin, begin) + begin
        if length < at + PASSAGE_TOKENS:
            number += record.num_longer(length)
            position = min(position, length)
    return number, position


def _continues(prompt: _Prompt, peer: Remembered, passages: Sequence[Passage]) -> bool:
    """Ours goes on where the earlier prompt of the same client, or its answer, ended."""
    last = max(passages, key=lambda passage: passage.theirs + passage.length)
    has_all = last.theirs + last.length >= num_tokens(peer.data) - _CUT_TOKENS
    return peer.client == prompt.admission.client and has_all and last.end + _CONTINUATION_TOKENS <= prompt.limit
