"""Prompts of a wanted number of tokens, for any tokenizer, by asking the endpoint what it counts.

Purpose: the words are so common that most tokenizers have each as one token, so that the count is close to linear in
the number of words; two short requests give the line, and every further answer corrects it.
Invariant: prompts are random, so that no prompt meets the prefix of an earlier one, unless it was made to.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvd.tools.bench_answer import Answer

_WORD_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect class control field development role effort rate heart drug show leader light "
    "voice wife police mind price report decision son view town road arm difference value building action season"
)
WORDS = tuple(_WORD_TEXT.split())

CALIBRATION_WORDS = (24, 120)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text of `num_words` words."""

    text: str
    num_words: int


def random_prompt(chance: random.Random, num_words: int) -> Prompt:
    """`num_words` random words, at least one."""
    num_words = max(1, num_words)
    return Prompt(" ".join(chance.choices(WORDS, k=num_words)), num_words)


def joined(prompts: Sequence[Prompt]) -> Prompt:
    """One prompt of several in a row."""
    return Prompt(" ".join(prompt.text for prompt in prompts), sum(prompt.num_words for prompt in prompts))


class Sizer:
    """How many words make how many tokens at one endpoint."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # words → prompt tokens, as counted by the endpoint
        self._slope = 1.0

    async def calibrate(self, complete: Callable[[Prompt, int], Awaitable[Answer]]) -> None:
        """Measure the line with two requests of one token each; ValueError where the counts do not grow."""
        chance = random.Random()
        counts = [(await complete(random_prompt(chance, words), 1)).prompt_tokens for words in CALIBRATION_WORDS]
        if counts[1] <= counts[0]:
            raise ValueError(f"usage.prompt_tokens does not grow with the prompt: {counts[0]}, then {counts[1]}")
        self._slope = (counts[1] - counts[0]) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0])

    def learn(self, num_words: int, num_tokens: int) -> None:
        """The endpoint counted `num_tokens` in a prompt of `num_words` words."""
        self._seen[num_words] = num_tokens

    def words_for(self, num_tokens: int) -> int:
        """Words of a prompt of about `num_tokens` tokens: from the nearest count that was seen, along the line."""
        words, tokens = min(self._seen.items(), key=lambda seen: abs(seen[1] - num_tokens), default=(0, 0))
        return max(1, words + round((num_tokens - tokens) / self._slope))
