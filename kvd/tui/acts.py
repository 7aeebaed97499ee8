"""What more than one page does to the engine, each with its question."""

from __future__ import annotations

from kvd.insight import Console
from kvd.tui.page import Do
from kvd.tui.question import Answer, Question
from kvd.tui.view import View
from kvd.views import RequestView


async def perform(act: Do, console: Console) -> str:
    """Do it; returns the line that says what came of it."""
    try:
        return await act.act(console)
    except Exception as error:  # whatever an injected console raises is for the operator to read
        return f"{act.name} failed: {error or type(error).__name__}"


def reset_cache(view: View | None) -> Do:
    """Drop every cached block that nobody uses."""
    cached = view.snapshot.num_blocks_cached if view is not None else 0
    has_tiers = view is not None and (view.snapshot.num_ram_blocks > 0 or view.snapshot.disk is not None)
    details = (
        f"{cached:,} cached blocks would be dropped.",
        *(["So would all that RAM and disk keep of them and others."] if has_tiers else []),
        "Prompts that begin alike are then computed again.",
    )
    answers = (Answer("n", "keep the cache", ""), Answer("y", "drop every cached block", "yes"))

    async def reset(console: Console) -> str:
        return f"{await console.reset_cache():,} cached blocks dropped"

    return Do("reset", reset, question=Question("Reset the prefix cache", details, answers))


def abort(row: RequestView) -> Do:
    """End one request."""
    details = (row.request_id, f"{row.client or 'unnamed client'}: {row.state}, {row.num_output_tokens} tokens")
    answers = (Answer("n", "let it run", ""), Answer("y", "abort it", "yes"))

    async def end(console: Console) -> str:
        was_running = await console.abort(row.request_id)
        return f"{row.request_id} {'aborted' if was_running else 'had ended already'}"

    return Do("abort", end, question=Question("Abort this request", details, answers))
