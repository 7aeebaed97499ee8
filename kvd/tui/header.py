"""Header: what serves, where, how, and whether it does."""

from __future__ import annotations

from kvd.tui.device import computes_on
from kvd.tui.format import age, exact, fit, shorten_middle
from kvd.tui.panel import Panel, Span, Spans, crop, justify, span_width
from kvd.tui.view import Link, View

_STATES: dict[str, Span] = {
    "ready": ("● ready", "good"),
    "loading": ("◌ loading", "warning"),
    "draining": ("◐ draining", "warning"),
    "failed": ("✖ failed", "error-bold"),
}


class Header(Panel):
    """Two lines: kvd, model and state; address, quantisation, backend, context and KV format."""

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        return [self._first(view, link, width), self._second(view, link, width)]

    def _first(self, view: View | None, link: Link, width: int) -> Spans:
        if link.problem:
            state: Spans = (("✖ disconnected", "error-bold"),)
        elif view is None:
            state = (("◌ connecting", "muted"),)
        else:
            state = (_STATES[view.snapshot.state], (f"  up {age(view.snapshot.uptime_seconds)}", "muted"))
        if link.is_read_only:
            state = (("read-only", "muted"), ("  ", "text"), *state)
        if link.is_paused:
            state = (("‖ paused", "warning-bold"), ("  ", "text"), *state)
        version = f" {view.snapshot.info.version}" if view is not None else ""
        badge: Spans = ((" kvd ", "badge"), (version + "  ", "muted"))
        room = width - span_width(badge) - span_width(state) - 2
        return justify((*badge, (shorten_middle(link.model, room), "bright")), (*state, (" ", "text")), width)

    def _second(self, view: View | None, link: Link, width: int) -> Spans:
        spans: list[Span] = [(" ", "text"), (link.address, "key")]
        if view is None:
            return crop(tuple(spans), width)
        info = view.snapshot.info
        device = computes_on(info, view.snapshot.device)
        facts = [
            ("", info.quantization),
            ("", device),
            ("context ", exact(info.max_model_len)),
            ("KV ", info.kv_cache_dtype),
        ]
        # What is long for its own sake is the device; the rest is short, and all of it is wanted at 80 columns.
        taken = span_width(spans) + sum(2 + len(label + text) for label, text in facts)
        if taken > width:
            facts[2] = ("ctx ", facts[2][1])
            facts[1] = ("", fit(device, max(4, len(device) - (taken - len("context ") + len("ctx ") - width))).rstrip())
        for label, text in facts:
            spans += [("  ", "text"), (label, "muted"), (text, "text")]
        return crop(tuple(spans), width)
