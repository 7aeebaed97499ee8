"""Prefix doctor: what keeps prompts from being found in the cache, ranked by what it costs. Owner: the event loop.

Invariant: nothing that is shown in here is text of a prompt; that takes the reveal key.
"""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from kvd.insight import DoctorReport, Finding, MissCause
from kvd.tui.finding import FindingScreen
from kvd.tui.format import NOTHING, duration, exact, fit, fit_right, percent, rate, short_count
from kvd.tui.listing import ListPanel, wrap
from kvd.tui.panel import Span, Spans, crop
from kvd.tui.reveal import show_text
from kvd.tui.view import Link, View

CAUSES: dict[MissCause, str] = {
    "volatile_line": "volatile line",
    "differs": "differs",
    "system_prompt": "system prompt",
    "reordered": "other order",
    "white_space": "white space",
    "history_rewritten": "history rewritten",
    "evicted": "evicted",
    "other_salt": "other salt",
    "other_format": "other KV format",
    "too_short": "too short",
    "new": "new",
}
"""Every cause in two words at most, for a table."""

_COLUMNS = (("lost", 6), ("reqs", 5), ("saves", 6), ("cause", 17), ("client", 14))
_MIN_HEIGHT_WITH_ADVICE = 6
_MAX_WIDTH_OF_CLIENT = 28
_MIN_WIDTH_WITH_WORDS = 100
_MAX_LINES = 4


class DoctorPanel(ListPanel):
    """The findings, those that cost most first, and the advice for the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "explain", show=False),
        Binding("v", "reveal", show=False),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="box")
        self._report: DoctorReport | None = None
        self._findings: tuple[Finding, ...] = ()
        self._filter = ""
        self.problem = ""
        """Why there is no report."""

    # ------------------------------------------------------------------ rows

    @property
    def num_rows(self) -> int:
        return len(self._findings)

    @property
    def selected(self) -> Finding | None:
        """The finding under the cursor."""
        return self._findings[self.cursor] if self._findings else None

    def put(self, report: DoctorReport) -> None:
        """Show this report from the next `show` on; the cursor stays with its finding."""
        self._report = report
        self._choose()

    def set_filter(self, text: str) -> None:
        """Show only findings about clients, or of causes, that have this in their name."""
        self._filter = text.casefold()
        self._choose()
        self.redraw()

    def _choose(self) -> None:
        selected = self.selected
        findings = () if self._report is None else self._report.findings
        self._findings = tuple(
            each for each in findings if self._filter in f"{each.client} {CAUSES[each.cause]}".casefold()
        )
        names = [_name(each) for each in self._findings]
        name = None if selected is None else _name(selected)
        self.place(names.index(name) if name in names else self.cursor)

    # ------------------------------------------------------------------ acts

    def action_explain(self) -> None:
        finding = self.selected
        if finding is None or self._report is None:
            return
        alike = tuple(
            miss
            for miss in self._report.recent
            if (miss.cause, miss.client, miss.endpoint) == (finding.cause, finding.client, finding.endpoint)
        )
        self.app.push_screen(FindingScreen(CAUSES[finding.cause], finding, alike))

    def action_reveal(self) -> None:
        if self.selected is not None:
            self.post_message(show_text(self.app, self.selected.example_id))

    # ------------------------------------------------------------------ drawing

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Prefix doctor", self.span_in_view

    def heading(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        report = self._report
        if report is None or not report.num_examined:
            return []
        lines = [_summary(report, width)]
        if self._findings:
            cells = (
                fit(title, cells) if title in ("cause", "client") else fit_right(title, cells)
                for title, cells in _widths(width - 2)
            )
            words = "  what keeps it from being found" if width >= _MIN_WIDTH_WITH_WORDS else ""
            lines.append(crop(((" " + " ".join(cells) + words, "muted"),), width))
        return lines

    def row(self, index: int, width: int, *, is_cursor: bool) -> Spans:
        finding = self._findings[index]
        saved = duration(finding.saved_seconds) if finding.saved_seconds > 0 else NOTHING
        texts: tuple[Span, ...] = (
            (short_count(finding.lost_tokens), "bright"),
            (short_count(finding.num_requests), "text"),
            (saved, "text"),
            (CAUSES[finding.cause], "warning"),
            (finding.client or "unnamed", "text"),
        )
        spans = [("▸", "key") if is_cursor else (" ", "text")]
        for (title, cells), (text, style) in zip(_widths(width - 2), texts, strict=True):
            text = fit(text, cells) if title in ("cause", "client") else fit_right(text, cells)
            spans.append((" " * (title != _COLUMNS[0][0]) + text, style))
        if width >= _MIN_WIDTH_WITH_WORDS:
            spans.append(("  " + finding.words, "text"))
        return crop(tuple(spans), width)

    def footing(self, width: int, height: int) -> list[Spans]:
        finding = self.selected
        if finding is None or height < _MIN_HEIGHT_WITH_ADVICE:
            return []
        room = max(1, (height - 3) // 3)
        lines: list[Spans] = []
        if width < _MIN_WIDTH_WITH_WORDS:
            lines += [((" " + line, "text"),) for line in wrap(finding.words, width - 1, room)]
        advice = wrap(finding.advice, width - 3, room)
        return [*lines, *(((" → " if not i else "   ", "key"), (line, "good")) for i, line in enumerate(advice))]

    def absence(self, view: View | None, link: Link, width: int) -> list[Spans]:
        if self._report is None:
            return [((line, "muted"),) for line in wrap(self.problem or "waiting for the doctor", width, _MAX_LINES)]
        if self._filter and self._report.findings:
            return [((fit("No finding matches the filter.", width), "muted"),)]
        if not self._report.num_examined:
            return [((fit("No prompt was examined yet.", width), "muted"),)]
        return [(("✓ ", "good"), (fit("No prompt lost tokens that it could have had.", width - 2), "text"))]


def _name(finding: Finding) -> tuple[str, str, str, int]:
    return finding.cause, finding.client, finding.endpoint, finding.position


def _summary(report: DoctorReport, width: int) -> Spans:
    """What is lost in all, of how much, at which rate of prefill it is counted, and how much was looked at."""
    spans: list[Span] = [
        (" ", "text"),
        (exact(report.lost_tokens), "warning-bold" if report.lost_tokens else "bright"),
        (f" of {short_count(report.prompt_tokens)} tokens lost (", "muted"),
        (percent(report.lost_tokens, report.prompt_tokens), "bright"),
        (f"), {percent(report.cached_tokens, report.prompt_tokens)} cached", "muted"),
        (f"; {short_count(report.num_examined)} prompts", "muted"),
    ]
    if report.num_skipped:
        spans.append((f", {short_count(report.num_skipped)} skipped", "warning"))
    if report.prefill_tokens_per_second > 0:
        spans.append((f"; prefill {rate(report.prefill_tokens_per_second)} tok/s", "muted"))
    return crop(tuple(spans), width)


def _widths(width: int) -> list[tuple[str, int]]:
    """The columns with their widths; without words beside them the client's name takes what is left."""
    spare = width - sum(cells + 1 for _, cells in _COLUMNS) + 1
    client = max(0, min(spare, _MAX_WIDTH_OF_CLIENT - 14)) if width < _MIN_WIDTH_WITH_WORDS - 2 else 6
    return [(title, cells + (client if title == "client" else 0)) for title, cells in _COLUMNS]
