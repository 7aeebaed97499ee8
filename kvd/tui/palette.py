"""The colours of the dashboard: its themes, and what the style names of panels mean in the one in use.

Owner: the event loop; `use` alone changes `STYLES` and `CURSOR_STYLES`, in place, for the whole process, as it has one
terminal. Invariant: colour repeats what a word, a letter or a pattern says already, so that the dashboard reads the
same under NO_COLOR and to a person who does not see the difference. Every theme has the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme


@dataclass(frozen=True, slots=True)
class Colors:
    """One theme. The pairs are the lowest and the highest row of a graph."""

    background: str
    raised: str
    border: str
    text: str
    bright: str
    muted: str
    faint: str
    active: str
    cached: str
    cached_deep: str  # behind the pattern and the label of cached blocks
    cached_dim: str  # cached blocks in graphs
    prefill: str
    decode: str
    warning: str
    error: str
    cursor: str
    selected: str
    prefill_graph: tuple[str, str]
    decode_graph: tuple[str, str]
    hits_graph: tuple[str, str]
    pool_graph: tuple[str, str]
    is_dark: bool = True


DARK = Colors(
    background="#0c1117",
    raised="#141b24",
    border="#2b3846",
    text="#d3dde6",
    bright="#f4f8fb",
    muted="#7d8fa1",
    faint="#3c4a59",
    active="#38d3c2",
    cached="#6f7ff0",
    cached_deep="#2b3270",
    cached_dim="#434da8",
    prefill="#f2b25c",
    decode="#7fdc8c",
    warning="#ffc65c",
    error="#ff6f6f",
    cursor="#1d2a3a",
    selected="#2b4057",
    prefill_graph=("#7d4f1c", "#ffd08a"),
    decode_graph=("#2c6b46", "#a9f5a4"),
    hits_graph=("#37408f", "#a3b0ff"),
    pool_graph=("#17655f", "#2fb3a6"),
)

LIGHT = Colors(
    background="#fbfaf7",
    raised="#f0eee8",
    border="#c3c9cf",
    text="#25313c",
    bright="#05090d",
    muted="#5f6f7e",
    faint="#b4bcc4",
    active="#00776b",
    cached="#3a49c4",
    cached_deep="#dfe2fb",
    cached_dim="#9aa4ea",
    prefill="#9a5a00",
    decode="#1f7a36",
    warning="#8f5f00",
    error="#c02626",
    cursor="#e4ebf2",
    selected="#cfdbe7",
    prefill_graph=("#e0b06a", "#9a5a00"),
    decode_graph=("#8ccf9b", "#1f7a36"),
    hits_graph=("#aeb6ef", "#3a49c4"),
    pool_graph=("#7cc4bb", "#00776b"),
    is_dark=False,
)

CONTRAST = Colors(
    background="#000000",
    raised="#000000",
    border="#ffffff",
    text="#ffffff",
    bright="#ffffff",
    muted="#d8d8d8",
    faint="#a0a0a0",
    active="#00ffff",
    cached="#b0b8ff",
    cached_deep="#303090",
    cached_dim="#7078ff",
    prefill="#ffc000",
    decode="#60ff60",
    warning="#ffff00",
    error="#ff8080",
    cursor="#303060",
    selected="#404080",
    prefill_graph=("#ffc000", "#ffc000"),
    decode_graph=("#60ff60", "#60ff60"),
    hits_graph=("#b0b8ff", "#b0b8ff"),
    pool_graph=("#00ffff", "#00ffff"),
)

_COLORS = {"dark": DARK, "light": LIGHT, "contrast": CONTRAST, "mono": DARK}

THEME_NAMES = tuple(_COLORS)
"""In the order in which the key for it goes through them. `mono` has no colours and no glyphs beyond ASCII."""

STYLES: dict[str, Style] = {}
"""What the names in a panel's spans mean."""

CURSOR_STYLES: dict[str, Style] = {}
"""The same on the row under the cursor."""

GRADIENT_STEPS = 8

_REVERSED = ("badge", "active-label", "error-badge", "warning-badge", "info-badge")
_BOLD = ("bright", "key", "cached-label")

_colors = DARK


def colors() -> Colors:
    """The colours in use."""
    return _colors


def use(name: str, *, has_color: bool = True) -> None:
    """Give the style names the meaning that they have in this theme; without colour, bold and reverse are left."""
    global _colors
    _colors = _COLORS[name]
    styles = _styles(_colors)
    if name == "mono" or not has_color:
        styles = {style: _colorless(style) for style in styles}
        on_cursor = {style: value + Style(reverse=not value.reverse) for style, value in styles.items()}
    else:
        background = Style(bgcolor=_colors.cursor)
        on_cursor = {s: v + background for s, v in styles.items() if not s.endswith(("label", "badge"))}
    STYLES.clear()
    STYLES.update(styles)
    CURSOR_STYLES.clear()
    CURSOR_STYLES.update(on_cursor)


def gradient(name: str, row: int, height: int) -> str:
    """Style name of graph row `row` (0 is the lowest) of `height`: the higher, the stronger."""
    step = GRADIENT_STEPS - 1 if height <= 1 else row * (GRADIENT_STEPS - 1) // (height - 1)
    return f"{name}-{step}"


def textual_themes() -> tuple[Theme, ...]:
    """The themes as Textual's style sheets see them, named `kvd-` and the name."""
    return tuple(_textual_theme(name, colors) for name, colors in _COLORS.items())


def _textual_theme(name: str, colors: Colors) -> Theme:
    return Theme(
        name=f"kvd-{name}",
        primary=colors.active,
        secondary=colors.cached,
        accent=colors.prefill,
        foreground=colors.text,
        background=colors.background,
        surface=colors.raised,
        panel=colors.raised,
        success=colors.decode,
        warning=colors.warning,
        error=colors.error,
        dark=colors.is_dark,
        variables={
            "kvd-border": colors.border,
            "kvd-muted": colors.muted,
            "kvd-bright": colors.bright,
            "kvd-cursor": colors.selected,
        },
    )


def _colorless(name: str) -> Style:
    if name in _REVERSED:
        return Style(bold=True, reverse=True)
    return Style(bold=True) if name in _BOLD or name.endswith("-bold") else Style()


def _styles(colors: Colors) -> dict[str, Style]:
    def on(color: str, background: str = colors.background, *, bold: bool = False) -> Style:
        return Style(color=color, bgcolor=background, bold=bold)

    styles = {
        "text": on(colors.text),
        "bright": on(colors.bright, bold=True),
        "muted": on(colors.muted),
        "faint": on(colors.faint),
        "badge": on(colors.background, colors.active, bold=True),
        "key": on(colors.active, bold=True),
        "active": on(colors.active),
        "active-bold": on(colors.active, bold=True),
        "active-label": on(colors.background, colors.active, bold=True),
        "cached": on(colors.cached),
        "cached-bold": on(colors.cached, bold=True),
        "cached-label": on(colors.bright, colors.cached_deep, bold=True),
        "cached-pattern": on(colors.cached, colors.cached_deep),
        "free": on(colors.faint),
        "free-label": on(colors.muted),
        "prefill": on(colors.prefill),
        "prefill-bold": on(colors.prefill, bold=True),
        "decode": on(colors.decode),
        "decode-bold": on(colors.decode, bold=True),
        "good": on(colors.decode),
        "warning": on(colors.warning),
        "warning-bold": on(colors.warning, bold=True),
        "error": on(colors.error),
        "error-bold": on(colors.error, bold=True),
        "error-badge": on(colors.background, colors.error, bold=True),
        "warning-badge": on(colors.background, colors.warning, bold=True),
        "info-badge": on(colors.background, colors.cached, bold=True),
        "pool-cached": on(colors.cached_dim),
    }
    for name, (low, high) in (
        ("prefill", colors.prefill_graph),
        ("decode", colors.decode_graph),
        ("hits", colors.hits_graph),
        ("pool", colors.pool_graph),
    ):
        for step in range(GRADIENT_STEPS):
            color = _mix(low, high, step / (GRADIENT_STEPS - 1))
            styles[f"{name}-{step}"] = on(color)
            styles[f"{name}-{step}-on-cached"] = on(color, colors.cached_dim)
    return styles


def _mix(low: str, high: str, share: float) -> str:
    mixed = (round(int(low[i : i + 2], 16) * (1 - share) + int(high[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)


use("dark")
