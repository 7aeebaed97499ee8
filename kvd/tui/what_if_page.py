"""Page of what would fit: settings that are tried, and a grid of contexts by requests at once.

Owner: the event loop. Invariant: nothing in here changes the engine; `y` copies what was tried as flags.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from kvd.cache.fitting import Fit
from kvd.cache.lengths import SeenLengths, seen_lengths
from kvd.geometry import HOST_SETTING, Choice
from kvd.tui.charts import divide
from kvd.tui.format import exact, fit_right, percent, size
from kvd.tui.page import Key, Note, Page
from kvd.tui.panel import Panel, Span, Spans, crop
from kvd.tui.view import Link, View
from kvd.tui.what_if import Cell, WhatIf, seen_words, short_tokens

NAME_WIDTH = 9
LABEL_WIDTH = 7
CELL_WIDTH = 8
_ABSENT = "this server does not say what its memory is like; it is an older kvd"
_PARTS = (("Weights", "cached"), ("Activations", "prefill"), ("KV", "active"))
"""What the letters of the bar stand for, each the first of a word."""


def _seen(view: View) -> SeenLengths | None:
    return seen_lengths(view.snapshot.histograms)


class SettingsPanel(Panel):
    """What runs, what is tried, where the memory goes then, and what is advised."""

    def __init__(self, state: WhatIf, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._state = state

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "What if", "nothing here changes the server"

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        info = view.snapshot.info
        self._state.put(info.geometry, info.max_model_len)
        if info.geometry is None:
            return [crop(((_ABSENT, "muted"),), width)]
        state = self._state
        now = _settings_line("now", state.now, state.now, info.max_model_len, info.geometry.room.setting)
        tried = _settings_line("tried", state.tried, state.now, info.max_model_len, info.geometry.room.setting)
        if state.is_as_now:
            tried = ((f"{'tried':<{NAME_WIDTH}}", "muted"), ("the same; the keys below change it", "muted"))
        lines = [now, tried, *_memory_lines(state, width), _largest_line(state), *_advice_lines(state, _seen(view))]
        return [crop(line, width) for line in lines]


def _settings_line(name: str, choice: Choice, now: Choice, served_len: int, setting: str) -> Spans:
    """The settings; a star marks what differs from now."""
    length = choice.max_model_len
    parts = (
        (choice.kv_cache_dtype, choice.kv_cache_dtype != now.kv_cache_dtype),
        (f"{setting.partition('_')[0]} memory {choice.share:g}", choice.share != now.share),
        (
            f"max_model_len {exact(length) if length is not None else f'auto ({exact(served_len)})'}"
            if choice is now or length is not None
            else "max_model_len auto",
            length != now.max_model_len,
        ),
        (f"max_num_seqs {choice.max_num_seqs}", choice.max_num_seqs != now.max_num_seqs),
    )
    spans: list[Span] = [(f"{name:<{NAME_WIDTH}}", "muted")]
    for index, (text, is_changed) in enumerate(parts):
        spans += [("  ", "text")] if index else []
        spans.append((f"{text}*" if is_changed else text, "active-bold" if is_changed else "text"))
    if choice.num_gpu_blocks_override is not None:
        spans.append((f"  {exact(choice.num_gpu_blocks_override)} blocks exactly", "muted"))
    elif choice.kv_cache_memory_bytes is not None:
        spans.append((f"  {size(choice.kv_cache_memory_bytes)} exactly", "muted"))
    return tuple(spans)


def _memory_lines(state: WhatIf, width: int) -> list[Spans]:
    """A bar of the memory, its parts named by letters; or why nothing would start."""
    fits, room = state.fits, state.geometry.room if state.geometry is not None else None
    assert room is not None
    if fits.refusal:
        return [(("✗ ", "error-bold"), ("would not start: ", "error-bold"), (fits.refusal, "error"))]
    amounts = (fits.weight_bytes, fits.step_bytes, fits.kv_bytes)
    rest = max(0, room.total_bytes - sum(amounts))
    cells = divide(max(0, width - NAME_WIDTH), (*amounts, rest))
    bar: list[Span] = [(f"{'memory':<{NAME_WIDTH}}", "muted")]
    for (name, style), count in zip(_PARTS, cells, strict=False):
        bar.append((name[0] * count, style))
    bar.append(("·" * cells[-1], "faint"))
    legend: list[Span] = [(" " * NAME_WIDTH, "muted")]
    for (name, style), num_bytes in zip(_PARTS, amounts, strict=True):
        legend += [(f"{name} ", style), (f"{size(num_bytes)}  ", "text")]
    whole = "of free RAM" if room.setting == HOST_SETTING else "of the card"
    legend[-1] = (legend[-1][0].rstrip(), "text")
    legend.append((f", {percent(fits.kv_bytes, room.total_bytes)} of {size(room.total_bytes)} {whole}", "muted"))
    return [tuple(bar), tuple(legend)]


def _largest_line(state: WhatIf) -> Spans:
    found: Fit = state.unasked
    if found.refusal:
        return ((f"{'largest':<{NAME_WIDTH}}", "muted"), ("no context fits", "error"))
    text = f"max_model_len {exact(found.largest_len)}, {exact(found.requests(found.largest_len))} at once"
    return (
        (f"{'largest':<{NAME_WIDTH}}", "muted"),
        (text, "bright"),
        (f"  in {exact(found.num_blocks)} blocks of {size(found.block_bytes)}", "muted"),
    )


def _advice_lines(state: WhatIf, seen: SeenLengths | None) -> list[Spans]:
    found = state.advice(seen)
    label = f"{'advice':<{NAME_WIDTH}}"
    if seen is None:
        requests = f"requests of {exact(found.expected_tokens)} tokens"
        words = f"--max-num-seqs {found.max_num_seqs} for {requests}; none has ended yet to learn from"
        return [((label, "muted"), (words, "text"))]
    advice = f"--max-model-len {found.max_model_len} --max-num-seqs {found.max_num_seqs}"
    lengths = f"  seen by {exact(seen.num_requests)} requests, p50, p90, p99: {seen_words(seen)}"
    return [((label, "muted"), (advice, "bright"), (lengths, "muted"))]


class GridPanel(Panel, can_focus=True):
    """✓ and ✗ by context and requests at once, with the share of the pool that each would take."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", show=False),
        Binding("right,l", "move(1, 0)", show=False),
        Binding("up,k", "move(0, -1)", show=False),
        Binding("down,j", "move(0, 1)", show=False),
    ]

    def __init__(self, state: WhatIf, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._state = state
        self._shown: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Requests at once by context", "‹›: looked at  []: as it runs  %: of the pool"

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None or view.snapshot.info.geometry is None:
            return []
        state = self._state
        state.put(view.snapshot.info.geometry, view.snapshot.info.max_model_len)
        contexts = state.contexts(max(1, (width - LABEL_WIDTH) // CELL_WIDTH))
        counts = state.counts(max(1, height - 2))
        self._shown = (contexts, counts)
        looked = state.look(self._shown)
        heads: list[Span] = [(f"{'':<{LABEL_WIDTH}}", "muted")]
        for length in contexts:
            style = "bright" if length == looked[0] else "muted"
            heads.append((fit_right(short_tokens(length), CELL_WIDTH - 1) + " ", style))
        lines: list[Spans] = [tuple(heads)]
        chosen: Cell | None = None
        for count in counts:
            line: list[Span] = [(fit_right(exact(count), LABEL_WIDTH - 2) + "  ", "muted")]
            if count == looked[1]:
                line = [(line[0][0], "bright")]
            for cell in state.row(count, contexts):
                is_looked = (cell.num_tokens, cell.num_requests) == looked
                is_now = (cell.num_tokens, cell.num_requests) == (state.served_len, state.now.max_num_seqs)
                chosen = cell if is_looked else chosen
                line.append(_cell_span(cell, is_looked=is_looked, is_now=is_now))
            lines.append(tuple(line))
        lines.append(_words(chosen, state) if chosen is not None else ())
        by_dtype = _dtype_lines(state)
        if height - len(lines) > len(by_dtype):
            lines += [(), *by_dtype]
        return [crop(line, width) for line in lines]

    def action_move(self, columns: int, rows: int) -> None:
        if self._shown[0]:
            self._state.move(columns, rows, self._shown)
            self.redraw()


def _cell_span(cell: Cell, *, is_looked: bool, is_now: bool) -> Span:
    mark = "✓" if cell.fits else "✗"
    share = "" if cell.share is None else percent(cell.share, 1.0) if cell.share < 9.995 else ">999%"
    text = f"{mark}{share:>{CELL_WIDTH - 3}}"
    style = "good" if cell.fits else "error"
    if is_looked:
        return f"‹{text}›", "bright" if cell.fits else "error-bold"
    return (f"[{text}]" if is_now else f" {text} "), style


def _words(cell: Cell, state: WhatIf) -> Spans:
    """What the marks of the cell mean, in a sentence."""
    verdict, style = ("✓ fit", "good") if cell.fits else ("✗ do not fit: some wait", "error")
    noun = "request" if cell.num_requests == 1 else "requests"
    words = f"  {exact(cell.num_requests)} {noun} of {exact(cell.num_tokens)} tokens: {size(cell.kv_bytes)} of KV cache"
    now = (cell.num_tokens, cell.num_requests) == (state.served_len, state.now.max_num_seqs)
    return (verdict, style), (words, "text"), ("  (as it runs)" if now else "", "muted")


def _dtype_lines(state: WhatIf) -> list[Spans]:
    """What is tried, with every KV dtype that is served."""
    heads = ("bytes per token", "blocks", "largest context", "at once")
    lines: list[Spans] = [
        ((f"{'KV dtype':<12}", "muted"), ("".join(fit_right(head, 17) for head in heads), "muted")),
    ]
    for dtype, found in state.by_dtype():
        is_tried = dtype == state.tried.kv_cache_dtype
        figures = (found.bytes_per_token, found.num_blocks, found.largest_len, found.requests(found.largest_len or 1))
        lines.append(
            (
                (f"{'›' if is_tried else ' '}{dtype:<11}", "bright" if is_tried else "text"),
                ("".join(fit_right(exact(round(figure)), 17) for figure in figures), "text"),
            )
        )
    return lines


class WhatIfPage(Page):
    """Settings above, the grid below."""

    title: ClassVar[str] = "What-if"

    DEFAULT_CSS = """
    WhatIfPage #what-if-settings { height: 8; }
    WhatIfPage #what-if-grid { height: 1fr; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "turn_dtype", show=False),
        Binding("left_square_bracket", "share(-1)", show=False),
        Binding("right_square_bracket", "share(1)", show=False),
        Binding("enter", "try_cell", show=False),
        Binding("u,backspace", "undo", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.state = WhatIf()
        self.settings = SettingsPanel(self.state, id="what-if-settings", classes="box")
        self.grid = GridPanel(self.state, id="what-if-grid", classes="box")

    def compose(self) -> ComposeResult:
        yield self.settings
        yield self.grid

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.settings, self.grid

    @property
    def keys(self) -> tuple[Key, ...]:
        return ("↑↓←→", "look"), ("enter", "try it"), ("d", "dtype"), ("[]", "share"), ("u", "undo")

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        return (
            (
                "What if",
                (
                    ("now, tried", "settings it runs with, and those tried; * has changed"),
                    ("W K A", "weights, KV cache, activations; the rest is not taken"),
                    ("largest", "the longest context that fits, and how often"),
                    ("advice", "from the lengths seen: p99 and a fifth more; p90 at once"),
                    ("y", "copies what was tried as flags of kvd serve"),
                ),
            ),
            (
                "Requests at once by context",
                (
                    ("✓ 40%", "they fit, and take 40% of the blocks of the pool"),
                    ("✗ 250%", "too many at once: some would wait"),
                    ("enter", "asks for that max_model_len and max_num_seqs"),
                ),
            ),
        )

    def copied(self) -> str:
        return self.state.flags() if self.state.geometry is not None else ""

    def action_turn_dtype(self) -> None:
        if self.state.geometry is not None:
            self.state.turn_dtype()
            self._repaint()

    def action_share(self, steps: int) -> None:
        if self.state.geometry is not None:
            words = self.state.change_share(steps)
            if words:
                self.post_message(Note(words))
            self._repaint()

    def action_try_cell(self) -> None:
        if self.state.geometry is not None:
            self.state.try_cell()
            self._repaint()

    def action_undo(self) -> None:
        if self.state.geometry is not None:
            self.state.undo()
            self._repaint()

    def _repaint(self) -> None:
        for panel in self.panels:
            panel.redraw()
