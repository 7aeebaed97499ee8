"""How a code model is asked for what belongs between two texts.

Purpose: models trained for it have three control tokens that mark what is before the gap, what is behind it, and where
the answer begins (Bavarian et al., arXiv 2207.14255, in the order prefix, suffix, middle). Frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
)


class InfillTokens(NamedTuple):
    """Ids of the three control tokens of one model."""

    prefix: int
    suffix: int
    middle: int

    def arrange(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """The prompt whose answer fills the gap."""
        return [self.prefix, *before, self.suffix, *behind, self.middle]


def find_infill_tokens(control_ids: Mapping[str, int]) -> InfillTokens | None:
    """Those of a tokenizer, whose control tokens are given by their text; None where it has none."""
    for family in _FAMILIES:
        if all(token in control_ids for token in family):
            return InfillTokens(*(control_ids[token] for token in family))
    return None
