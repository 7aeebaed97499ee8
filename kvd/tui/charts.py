"""Bars and graphs out of block characters. Pure functions, callable from any thread.

Invariant: a part that is not zero is never drawn as nothing, and the parts of a bar add up to its width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def divide(width: int, parts: Sequence[int]) -> list[int]:
    """Share `width` cells out in proportion to `parts`, by largest remainder.

    Every part above zero gets a cell as long as there are as many cells as such parts.
    """
    total = sum(parts)
    if total <= 0 or width <= 0:
        return [0] * len(parts)
    quotas = [width * part / total for part in parts]
    cells = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (cells[i] - quotas[i], i))
    for index in by_remainder[: width - sum(cells)]:
        cells[index] += 1
    if width >= sum(part > 0 for part in parts):
        for index, part in enumerate(parts):
            if part > 0 and cells[index] == 0:
                cells[cells.index(max(cells))] -= 1
                cells[index] = 1
    return cells


def levels(values: Sequence[float | None], height: int, top: float) -> list[int]:
    """Heights in eighths of a row, 0 … 8 * height, of values in 0 … top; None and 0 are 0, else at least 1."""
    full = 8 * height
    result = []
    for value in values:
        if value is None or value <= 0 or top <= 0:
            result.append(0)
        else:
            result.append(max(1, min(full, round(full * value / top))))
    return result


def area(values: Sequence[float | None], width: int, height: int, top: float) -> list[str]:
    """A filled graph of the last `width` values, newest at the right, as `height` rows from the top down."""
    if width <= 0 or height <= 0:
        return []
    shown = values[-width:]
    columns = [0] * (width - len(shown)) + levels(shown, height, top)
    return ["".join(EIGHTHS[min(8, max(0, column - 8 * row))] for column in columns) for row in reversed(range(height))]


def nice_top(values: Sequence[float | None]) -> float:
    """The smallest round number that is not below the largest value; 1 where all are (almost) 0."""
    largest = max((value for value in values if value is not None), default=0.0)
    if largest < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    for factor in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0):
        # The tolerance keeps 1000 from becoming 2000 by a rounding error of the logarithm.
        if largest <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power


def meter(fraction: float, width: int) -> tuple[str, str]:
    """A progress bar as its filled and its empty part, together `width` cells."""
    filled = min(width, max(0, round(fraction * width)))
    if fraction > 0 and filled == 0 and width > 0:
        filled = 1
    if fraction < 1 and filled == width and width > 1:
        filled = width - 1
    return "━" * filled, "─" * (width - filled)
