"""The colours of the dashboard, in one place. Constants only.

Invariant: colour repeats what a word, a letter or a pattern says already, so that the dashboard reads the same
under NO_COLOR and to a person who does not see the difference.
"""

from __future__ import annotations

from rich.style import Style
from textual.theme import Theme

BACKGROUND = "#0c1117"
RAISED = "#141b24"
BORDER = "#2b3846"
TEXT = "#d3dde6"
BRIGHT = "#f4f8fb"
MUTED = "#7d8fa1"
FAINT = "#3c4a59"
ACTIVE = "#38d3c2"
CACHED = "#6f7ff0"
PREFILL = "#f2b25c"
DECODE = "#7fdc8c"
GOOD = "#7fdc8c"
WARNING = "#ffc65c"
ERROR = "#ff6f6f"
CURSOR = "#1d2a3a"
SELECTED = "#2b4057"

THEME = Theme(
    name="kvd",
    primary=ACTIVE,
    secondary=CACHED,
    accent=PREFILL,
    foreground=TEXT,
    background=BACKGROUND,
    surface=RAISED,
    panel=RAISED,
    success=GOOD,
    warning=WARNING,
    error=ERROR,
    dark=True,
    variables={"kvd-border": BORDER, "kvd-muted": MUTED, "kvd-bright": BRIGHT, "kvd-cursor": SELECTED},
)


def _on(color: str, background: str = BACKGROUND, *, bold: bool = False) -> Style:
    return Style(color=color, bgcolor=background, bold=bold)


STYLES: dict[str, Style] = {
    "text": _on(TEXT),
    "bright": _on(BRIGHT, bold=True),
    "muted": _on(MUTED),
    "faint": _on(FAINT),
    "badge": _on(BACKGROUND, ACTIVE, bold=True),
    "key": _on(ACTIVE, bold=True),
    "active": _on(ACTIVE),
    "active-bold": _on(ACTIVE, bold=True),
    "active-label": _on(BACKGROUND, ACTIVE, bold=True),
    "cached": _on(CACHED),
    "cached-bold": _on(CACHED, bold=True),
    "cached-label": _on(BRIGHT, "#2b3270", bold=True),
    "cached-pattern": _on(CACHED, "#2b3270"),
    "free": _on(FAINT),
    "free-label": _on(MUTED),
    "prefill": _on(PREFILL),
    "prefill-bold": _on(PREFILL, bold=True),
    "decode": _on(DECODE),
    "decode-bold": _on(DECODE, bold=True),
    "good": _on(GOOD),
    "warning": _on(WARNING),
    "warning-bold": _on(WARNING, bold=True),
    "error": _on(ERROR),
    "error-bold": _on(ERROR, bold=True),
    "error-badge": _on(BACKGROUND, ERROR, bold=True),
    "warning-badge": _on(BACKGROUND, WARNING, bold=True),
    "info-badge": _on(BACKGROUND, CACHED, bold=True),
}
"""What the names in a panel's spans mean."""

CURSOR_STYLES: dict[str, Style] = {
    name: style + Style(bgcolor=CURSOR) for name, style in STYLES.items() if not name.endswith(("label", "badge"))
}
"""The same on the row under the cursor."""


def _mix(low: str, high: str, share: float) -> str:
    mixed = (round(int(low[i : i + 2], 16) * (1 - share) + int(high[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)


_CACHED_DIM = "#434da8"
GRADIENT_STEPS = 8
for _name, _low, _high in (
    ("prefill", "#7d4f1c", "#ffd08a"),
    ("decode", "#2c6b46", "#a9f5a4"),
    ("hits", "#37408f", "#a3b0ff"),
    ("pool", "#17655f", "#2fb3a6"),
):
    for _step in range(GRADIENT_STEPS):
        STYLES[f"{_name}-{_step}"] = _on(_mix(_low, _high, _step / (GRADIENT_STEPS - 1)))
        STYLES[f"{_name}-{_step}-on-cached"] = _on(_mix(_low, _high, _step / (GRADIENT_STEPS - 1)), _CACHED_DIM)
STYLES["pool-cached"] = _on(_CACHED_DIM)


def gradient(name: str, row: int, height: int) -> str:
    """Style name of graph row `row` (0 is the lowest) of `height`: the higher, the lighter."""
    step = GRADIENT_STEPS - 1 if height <= 1 else row * (GRADIENT_STEPS - 1) // (height - 1)
    return f"{name}-{step}"
