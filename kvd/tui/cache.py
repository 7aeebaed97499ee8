"""Prefix cache: hit rate lately and in total, what a pool that is too small costs, and why prompts missed most."""

from __future__ import annotations

from kvd.tui.causes import worst_cause
from kvd.tui.charts import area
from kvd.tui.format import NOTHING, exact, fit_right, percent, short_count
from kvd.tui.palette import gradient
from kvd.tui.panel import Panel, Spans, crop, justify
from kvd.tui.view import Link, View
from kvd.views import Counters

_MIN_GRAPH_ROWS = 3


class CachePanel(Panel):
    """Hit rate in tokens, evictions, preemptions and what had to be computed again."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        if view is None:
            return "Prefix cache", ""
        snapshot = view.snapshot
        facts = []
        if snapshot.num_ram_blocks:
            facts.append(f"RAM {short_count(snapshot.num_ram_blocks_used)} of {short_count(snapshot.num_ram_blocks)}")
        if snapshot.num_blocks_pinned:
            facts.append(f"{short_count(snapshot.num_blocks_pinned)} pinned")
        return "Prefix cache", ", ".join(facts)

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        counters, recent = view.snapshot.counters, view.recent
        lines: list[Spans] = []
        if view.snapshot.info.prefix_caching:
            window = f"{max(1, round(recent.seconds))}s"
            queries, hits = counters.prefix_query_tokens, counters.prefix_hit_tokens
            lately = percent(recent.hit_tokens, recent.query_tokens) if recent.query_tokens else NOTHING
            lines.append(
                justify(
                    (("hit rate   ", "muted"), (f"{lately:>4}", "cached-bold"), (f" last {window}", "muted")),
                    ((percent(hits, queries), "bright"), (" total", "muted")),
                    width,
                )
            )
            numbers = f"{exact(hits)} of {exact(queries)} tok"
            if len(numbers) > width - 11:
                numbers = f"{short_count(hits)} of {short_count(queries)} tok"
            lines.append((("hits       ", "muted"), (numbers, "text")))
        else:
            lines += [
                (("off: every prompt is computed whole", "warning"),),
                (("set enable_prefix_caching: true", "muted"),),
            ]
        sources = _sources(counters)
        if sources:
            lines.append(crop((("└ ", "muted"), (sources, "text")), width))
        cause = worst_cause(view.snapshot)
        is_low = height < len(lines) + 3 + (cause is not None)
        again = f", {short_count(counters.recomputed_tokens)} tok again" if is_low else ""
        lines.append(_fact("evicted", counters.num_evicted_blocks, " blocks", recent.evicted_blocks, width))
        lines.append(_fact("preempted", counters.num_preemptions, again, recent.preemptions, width, alarming=True))
        if not is_low:
            lines.append(_fact("recomputed", counters.recomputed_tokens, " tok", recent.recomputed_tokens, width))
        if cause is not None:
            lost = f" {short_count(cause.lost_tokens)} tok"
            lines.append(justify((("misses     ", "muted"), (cause.short, "warning")), ((lost, "text"),), width))
        rows = height - len(lines) - 1
        if rows >= _MIN_GRAPH_ROWS and view.snapshot.info.prefix_caching:
            graph: list[Spans] = [justify((("hit rate", "muted"),), (("top 100%", "faint"),), width)]
            drawn = area(view.series.hit_ratio, width, rows - 1, 1.0)
            for index, row in enumerate(drawn):
                above = len(drawn) - 1 - index
                graph.append(((row if above else row.replace(" ", "▁"), gradient("hits", above, len(drawn))),))
            lines = [*graph, (), *lines]
        return lines


def _sources(counters: Counters) -> str:
    """Hit tokens that did not come whole from the pool: from RAM, from disk, and of a part of a block."""
    parts = (
        ("RAM", counters.ram_hit_tokens),
        ("disk", counters.disk_hit_tokens),
        ("part", counters.partial_hit_tokens),
    )
    return " ".join(f"{name} {short_count(count)}" for name, count in parts if count)


def _fact(name: str, total: int, unit: str, recently: int, width: int, *, alarming: bool = False) -> Spans:
    """`evicted  120 blocks     +3`: the total, and at the right what was added lately."""
    style = "muted" if recently == 0 else "warning-bold" if alarming else "bright"
    added = f"+{short_count(recently)}" if recently else ""
    left: Spans = ((f"{name:<11}", "muted"), (exact(total), "text"), (unit, "muted"))
    return justify(left, ((fit_right(added, 6), style),), width)
