"""What leaving the dashboard means: it closes, or the server stops with it."""

from __future__ import annotations

from typing import Literal

from kvd.tui.question import Answer, Question
from kvd.tui.view import View

Outcome = Literal["close", "stop"]
"""What the operator wants of the server when the dashboard ends: nothing, or that it stops."""


def leave_question(address: str, view: View | None) -> Question:
    """Asks which; answers an `Outcome`, or "" for neither."""
    answers = (
        Answer("c", "close the dashboard, keep serving", "close"),
        Answer("s", "stop the server", "stop"),
        Answer("n", "cancel", ""),
    )
    return Question("Leave", _what_stopping_means(address, view), answers, ctrl_c="stop")


def _what_stopping_means(address: str, view: View | None) -> tuple[str, ...]:
    if view is None:
        return (f"kvd serves on {address}.",)
    count = view.snapshot.num_running + view.snapshot.num_waiting
    served = {
        0: "No request is being served.",
        1: "1 request is being served; stopping lets it finish.",
    }
    more = f"{count} requests are being served; stopping lets them finish."
    return (f"kvd serves on {address}.", served.get(count, more))
