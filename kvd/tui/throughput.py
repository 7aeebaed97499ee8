"""Throughput: prefill and decode tokens per second, latency to and between tokens and in the queue, the latest step."""

from __future__ import annotations

from kvd.tui.charts import area, nice_top
from kvd.tui.device import device_line
from kvd.tui.format import NOTHING, duration, rate, short_count
from kvd.tui.palette import gradient
from kvd.tui.panel import Panel, Span, Spans, crop, span_width
from kvd.tui.rates import Quantile
from kvd.tui.view import Latency, Link, View

_MIN_HEIGHT_WITH_GRAPHS = 10
_MIN_WIDTH_SIDE_BY_SIDE = 64
_TITLE_MARGIN = 4  # corners and blanks that Textual puts beside a title


class ThroughputPanel(Panel):
    """Six lines where room is scarce; graphs above four lines where it is not. The lower border is the device's."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        facts = None if view is None else view.snapshot.device
        return "Throughput, latency of 60s", device_line(facts, self.size.width - _TITLE_MARGIN)

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        if height < _MIN_HEIGHT_WITH_GRAPHS:
            return [
                _sparkline("prefill", view.prefill_rate, view.series.prefill, width),
                _sparkline("decode", view.decode_rate, view.series.decode, width),
                *_latencies(view, width),
            ]
        rows = height - 5
        prefill, decode = view.series.prefill, view.series.decode
        if width >= _MIN_WIDTH_SIDE_BY_SIDE:
            half = (width - 3) // 2
            left = _graph("prefill", view.prefill_rate, prefill, half, rows)
            right = _graph("decode", view.decode_rate, decode, half, rows)
            graphs = [(*a, ("   ", "text"), *b) for a, b in zip(left, right, strict=True)]
        else:
            graphs = _graph("prefill", view.prefill_rate, prefill, width, (rows + 1) // 2)
            graphs += _graph("decode", view.decode_rate, decode, width, rows // 2)
        return [*graphs, (), *_latencies(view, width)]


def _sparkline(name: str, value: float | None, series: tuple[float | None, ...], width: int) -> Spans:
    head = f"{rate(value):>6} tok/s "
    room = width - 8 - len(head)
    spark = area(series, room, 1, max((v for v in series[-max(1, room) :] if v is not None), default=1.0))
    return ((f"{name:<8}", "muted"), (head, f"{name}-bold"), (spark[0] if spark else "", name))


def _graph(name: str, value: float | None, series: tuple[float | None, ...], width: int, height: int) -> list[Spans]:
    """A heading with the figure and the graph's top, and `height - 1` rows of graph, each `width` cells."""
    shown = series[-width:]
    top = nice_top(shown)
    figure, scale = f"{rate(value)} tok/s", f"top {short_count(top)}"
    gap = " " * max(1, width - len(name) - 1 - len(figure) - len(scale))
    lines: list[Spans] = [((f"{name} ", "muted"), (figure, f"{name}-bold"), (gap, "text"), (scale, "faint"))]
    rows = area(shown, width, height - 1, top)
    for index, row in enumerate(rows):
        above_floor = len(rows) - 1 - index
        floor = row if above_floor else row.replace(" ", "▁")
        lines.append(((floor, gradient(name, above_floor, len(rows))),))
    return lines


def _latencies(view: View, width: int) -> list[Spans]:
    step = view.snapshot.last_step
    allowed = f" of {view.snapshot.step_budget}" if view.snapshot.step_budget else ""
    brief = f"{step.num_decode_tokens} dec + {step.num_prefill_tokens} pre"
    mixes = (f"{step.num_decode_tokens} decode + {step.num_prefill_tokens} prefill{allowed}", f"{brief}{allowed}")
    took = duration(step.seconds or None)
    mix = next((text for text in mixes if 8 + len(text) + 2 + len(took) <= width), brief)
    return [
        _latency("TTFT", view.ttft, view.series.ttft, width),
        _latency("ITL", view.itl, view.series.itl, width),
        _latency("queue", view.queue, view.series.queue, width),
        crop((("step    ", "muted"), (mix, "text"), (f"  {took}", "bright")), width),
    ]


def _latency(name: str, latency: Latency, series: tuple[float | None, ...], width: int) -> Spans:
    spans: list[Span] = [
        (f"{name:<8}", "muted"),
        ("p50 ", "muted"),
        (f"{_quantile(latency.p50):<6}", "bright"),
        ("p95 ", "muted"),
        (f"{_quantile(latency.p95):<7}", "text"),
    ]
    if latency.is_recent:
        room = width - span_width(spans)
        shown = series[-max(1, room) :]
        spark = area(shown, room, 1, max((value for value in shown if value is not None), default=1.0))
        spans.append((spark[0] if spark else "", "cached"))
    elif latency.p50 is not None:
        spans.append(("of all", "faint"))
    return crop(tuple(spans), width)


def _quantile(value: Quantile | None) -> str:
    if value is None:
        return NOTHING
    return (">" if value.is_lower_bound else "") + duration(value.value)
