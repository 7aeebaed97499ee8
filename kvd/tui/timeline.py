"""What became of one request: where its time went, and one row for each thing that happened. Owner: the event loop.

The shares of time are computed from the entries alone; only the stretch after the latest entry of a request that runs
goes by the state that its row in the request table shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvd.insight import Timeline, TimelineEntry, TimelineKind
from kvd.tui.charts import divide
from kvd.tui.format import NOTHING, clean, duration, exact, fit, percent, short_count, shorten_middle
from kvd.tui.listing import ListPanel, wrap
from kvd.tui.panel import Spans, crop, justify, span_width
from kvd.tui.view import Link, View
from kvd.views import RequestState, RequestView

Phase = Literal["queued", "prefill", "decode", "preempted"]

PHASES: tuple[Phase, ...] = get_args(Phase)

_MARKS: dict[Phase, str] = {"queued": "░", "prefill": "▒", "decode": "█", "preempted": "x"}

_STATE_PHASES: dict[RequestState, Phase] = {
    "waiting": "queued", "restoring": "prefill", "prefill": "prefill", "decode": "decode", "preempted": "preempted",
    "swapped": "preempted",
}  # fmt: skip

_STYLES: dict[Phase, str] = {"queued": "muted", "prefill": "prefill", "decode": "decode", "preempted": "warning"}


@dataclass(frozen=True, slots=True)
class Kind:
    """How entries of one kind are shown. `tokens` says what their number counts, where there is no reason to show."""

    mark: str
    word: str
    style: str
    tokens: str = ""


KINDS: dict[TimelineKind, Kind] = {
    "queued": Kind("○", "queued", "muted", "in the prompt"),
    "waiting": Kind("◌", "waiting", "muted"),
    "admitted": Kind("▸", "admitted", "bright"),
    "hit": Kind("◆", "hit", "cached", "found in the cache"),
    "restored": Kind("↑", "restored", "cached", "from RAM or disk"),
    "chunk": Kind("▪", "chunk", "prefill", "computed"),
    "first_token": Kind("●", "first token", "decode-bold"),
    "forgot": Kind("◇", "forgot", "warning", "left out of the KV cache"),
    "preempted": Kind("↓", "preempted", "warning-bold"),
    "resumed": Kind("↪", "resumed", "bright"),
    "finished": Kind("■", "finished", "good", "generated"),
}

_UNKNOWN = Kind("·", "", "text")
_TIME_WIDTH = 9
_WORD_WIDTH = 13
_TOKENS_WIDTH = 7
_MIN_ID_WIDTH = 14
_MIN_WIDTH_WITH_GAPS = 100
"""From here on there is a column with the time since the entry before."""


def phase_lengths(timeline: Timeline, age_seconds: float, state: RequestState | None = None) -> dict[Phase, float]:
    """Seconds in each phase until now, or until the request ended.

    age_seconds: since it arrived. state: of a request that runs, where it is known.

    After a preemption in the middle of decoding the chunks that compute lost tokens again are prefill, and what comes
    after the last of them is decode.
    """
    entries = timeline.entries
    seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    phase: Phase = "queued"
    last, has_token = 0.0, False
    for index, entry in enumerate(entries):
        seconds[phase] += max(0.0, entry.seconds - last)
        last = max(last, entry.seconds)
        if entry.kind == "admitted":
            phase = "prefill"
        elif entry.kind == "first_token":
            phase, has_token = "decode", True
        elif entry.kind == "preempted":
            phase = "preempted"
        elif entry.kind in ("resumed", "chunk") and phase != "queued":
            phase = "decode" if has_token and not _computes_more(entries, index + 1) else "prefill"
    if not timeline.has_ended:
        phase = _STATE_PHASES[state] if state is not None else phase
        seconds[phase] += max(0.0, age_seconds - last)
    return seconds


def _computes_more(entries: tuple[TimelineEntry, ...], start: int) -> bool:
    """Whether a chunk comes before the request loses its place again."""
    for index in range(start, len(entries)):
        entry = entries[index]
        if entry.kind in ("chunk", "preempted", "finished"):
            return entry.kind == "chunk"
    return False


def phase_lines(seconds: dict[Phase, float], width: int) -> list[Spans]:
    """A bar in proportion to the seconds, and what its parts are."""
    cells = divide(width, [round(seconds[phase] * 1e6) for phase in PHASES])
    bar: Spans = tuple(
        (_MARKS[phase] * count, _STYLES[phase]) for phase, count in zip(PHASES, cells, strict=True) if count
    )
    legend = _legend(seconds, has_shares=True)
    return [bar, legend if span_width(legend) <= width else crop(_legend(seconds, has_shares=False), width)]


def _legend(seconds: dict[Phase, float], *, has_shares: bool) -> Spans:
    total = sum(seconds.values())
    legend: Spans = ()
    for phase in PHASES:
        is_there = seconds[phase] > 0
        share = f" {percent(seconds[phase], total)}" if is_there and has_shares else ""
        legend = (
            *legend,
            (("  " if legend else "") + _MARKS[phase], _STYLES[phase]),
            (f" {phase} ", "muted"),
            (duration(seconds[phase]) if is_there else NOTHING, "bright" if is_there else "faint"),
            (share, "muted"),
        )
    return legend


def moment(seconds: float) -> str:
    """Time since arrival in at most eight characters: `0.123s`, `59.900s`, `12m03.4s`, `3h05m12s`."""
    milliseconds = round(max(0.0, seconds) * 1e3)
    if milliseconds < 100_000:
        return f"{milliseconds / 1e3:.3f}s"
    tenths = milliseconds // 100
    if tenths < 36_000:
        return f"{tenths // 600}m{tenths % 600 / 10:04.1f}s"
    whole = tenths // 10
    return f"{whole // 3600}h{whole // 60 % 60:02d}m{whole % 60:02d}s"


def ending(timeline: Timeline) -> str:
    """How a request ended, in a word or two: its last reason up to the figures."""
    return clean(timeline.entries[-1].reason.partition(":")[0]) if timeline.entries else ""


class TimelinePanel(ListPanel):
    """One request. Shows its latest entry while it runs, unless the operator has moved up."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, follows=True, classes=classes)
        self.request_id = ""
        self.timeline: Timeline | None = None
        self.is_known: bool | None = None

    def begin(self, request_id: str) -> None:
        """Show this request from now on; nothing is known of it yet."""
        if request_id != self.request_id:
            self.timeline, self.is_known, self.is_following = None, None, True
        self.request_id = request_id

    def take(self, request_id: str, timeline: Timeline | None) -> None:
        """What the engine answered. A request of which nothing more is known stays as it was seen last."""
        if request_id == self.request_id:
            if self.timeline is None and timeline is not None and timeline.has_ended:
                self.is_following = False  # a story that is over is read from its beginning
                self.cursor = 0
            self.is_known = timeline is not None
            self.timeline = timeline or self.timeline
            self.redraw()

    @property
    def entries(self) -> tuple[TimelineEntry, ...]:
        return self.timeline.entries if self.timeline is not None else ()

    @property
    def num_rows(self) -> int:
        return len(self.entries)

    @property
    def has_ended(self) -> bool:
        """Nothing more will come of it, as far as is known."""
        return self.timeline is not None and self.timeline.has_ended

    # ------------------------------------------------------------------ drawing

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        left_out = self.timeline.num_left_out if self.timeline is not None else 0
        merged = f"{exact(left_out)} more entries merged, " if left_out else ""
        return "Timeline", merged + self.span_in_view

    def absence(self, view: View | None, link: Link, width: int) -> list[Spans]:
        if self.is_known is None:
            return [crop((("Asking what became of ", "muted"), (clean(self.request_id), "bright")), width)]
        if self.timeline is not None:
            return [(("Nothing has happened to it yet.", "muted"),)]
        return [
            crop((("Nothing is known of ", "warning"), (clean(self.request_id), "bright")), width),
            *(
                ((line, "muted"),)
                for line in wrap(
                    "It never came here, or it ended so long ago that its timeline is gone. "
                    "Esc goes back; e there lists the requests that ended lately.",
                    width,
                    4,
                )
            ),
        ]

    def heading(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        timeline = self.timeline
        if timeline is None:
            return []
        row = _row_of(view, timeline.request_id)
        lines = [self._title_line(timeline, row, width)]
        if height < 6:
            return lines
        last = timeline.entries[-1].seconds if timeline.entries else 0.0
        age = max(last, row.age_seconds if row is not None else last)
        seconds = phase_lengths(timeline, age, row.state if row is not None else None)
        lines += phase_lines(seconds, width)
        if height >= 9:
            # The rows below begin with a cell for the cursor.
            gap = f"{'after':>{_TIME_WIDTH}}" if width >= _MIN_WIDTH_WITH_GAPS else ""
            columns = f" {'at':>{_TIME_WIDTH}}{gap}  {'what':<{_WORD_WIDTH + 2}}{'tokens':>{_TOKENS_WIDTH}}  why"
            lines.append(((fit(columns, width), "muted"),))
        return lines

    def _title_line(self, timeline: Timeline, row: RequestView | None, width: int) -> Spans:
        name = clean(timeline.request_id)
        facts: Spans = (
            ("  ", "text"),
            (clean(timeline.client) or "unnamed client", "text"),
            (f"  {clean(timeline.endpoint)}  {exact(timeline.num_prompt_tokens)} tokens", "muted"),
        )
        if timeline.has_ended:
            state: Spans = ((f"ended: {ending(timeline)}" if timeline.entries else "ended", "bright"),)
        elif self.is_known is False:
            state = (("no longer known", "warning"),)
        elif row is None:
            state = (("runs", "good"),)
        else:
            output = f" {short_count(row.num_output_tokens)}/{short_count(row.max_tokens)}" if row.ttft_seconds else ""
            state = ((row.state + output, _STYLES[_STATE_PHASES[row.state]]),)
        room = width - span_width(facts) - span_width(state) - 2
        facts = ((shorten_middle(name, max(_MIN_ID_WIDTH, room)), "bright"), *facts)
        return justify(facts, state, width) if span_width(state) < width - 8 else crop(facts, width)

    def row(self, index: int, width: int, *, is_cursor: bool) -> Spans:
        entry = self.entries[index]
        kind = KINDS.get(entry.kind, _UNKNOWN)
        tokens = exact(entry.num_tokens) if entry.num_tokens else ""
        spans: Spans = (
            ("▸" if is_cursor else " ", "key" if is_cursor else "text"),
            (f"{moment(entry.seconds):>{_TIME_WIDTH}}", "text"),
        )
        if width >= _MIN_WIDTH_WITH_GAPS:
            before = self.entries[index - 1].seconds if index else 0.0
            spans = (*spans, (f"{'+' + duration(entry.seconds - before):>{_TIME_WIDTH}}", "muted"))
        spans = (
            *spans,
            (f"  {kind.mark} ", kind.style),
            (fit(kind.word or entry.kind, _WORD_WIDTH), kind.style),
            (f"{tokens:>{_TOKENS_WIDTH}}", "text"),
            ("  ", "text"),
        )
        room = width - span_width(spans)
        return (*spans, (fit(self._why(entry), room), "muted")) if room > 0 else crop(spans, width)

    def _why(self, entry: TimelineEntry) -> str:
        """The reason, or at least what the tokens are."""
        kind = KINDS.get(entry.kind, _UNKNOWN)
        return clean(entry.reason or (kind.tokens if entry.num_tokens else ""))

    def footing(self, width: int, height: int) -> list[Spans]:
        """The reason in full where its row is too short for it."""
        text = self._why(self.entries[self.cursor])
        gaps = _TIME_WIDTH if width >= _MIN_WIDTH_WITH_GAPS else 0
        room = width - 1 - _TIME_WIDTH - gaps - 4 - _WORD_WIDTH - _TOKENS_WIDTH - 2
        if height < 8 or span_width(((text, "text"),)) <= room:
            return []
        return [((line, "bright"),) for line in wrap(text, width, 3)]


def _row_of(view: View | None, request_id: str) -> RequestView | None:
    rows = view.requests if view is not None else ()
    return next((row for row in rows if row.request_id == request_id), None)
