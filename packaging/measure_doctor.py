"""What the prefix doctor costs: processor time per prompt, memory, and the longest time for which others have to wait.

python packaging/measure_doctor.py [number of remembered prompts] [their length]
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from kvd.insight import Admission
from kvd.observe.doctor_causes import diagnose
from kvd.observe.doctor_memory import PromptMemory
from kvd.observe.doctor_passages import encode

VOCABULARY = 49_000
NUM_PROMPTS = 60
GENERATOR = random.Random(1)

Prompt = tuple[list[int], int]
"""Token ids, and how many of them are cached."""


def tokens(length: int) -> list[int]:
    return GENERATOR.choices(range(VOCABULARY), k=length)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(f"w{token_id} " for token_id in token_ids)


def no_pace() -> None:
    return None


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def admission(number: int, prompt: Prompt) -> Admission:
    return Admission(f"request-{number}", "client", "chat", "", time.monotonic(), tuple(prompt[0]), prompt[1])


def loads(remembered: list[list[int]]) -> dict[str, Callable[[int], Prompt]]:
    """Name of a kind of prompt → what makes the next one, by its number."""
    head, tail, long_tail = tokens(14), tokens(900), tokens(7000)
    documents = [tokens(700) for _ in range(10)]

    def shuffled(number: int) -> Prompt:
        order = GENERATOR.sample(documents, len(documents))
        return [*head, *(token for document in order for token in document), *tokens(50)], 14 if number else 0

    return {
        "1,000 tokens, new": lambda _: (tokens(1000), 0),
        "1,000 tokens, 950 cached": lambda number: (remembered[number][:950] + tokens(50), 950),
        "1,000 tokens, a line differs": lambda number: (head + tokens(6) + tail + tokens(80), 14 if number else 0),
        "8,000 tokens, new": lambda _: (tokens(8000), 0),
        "8,000 tokens, a line differs": lambda number: (
            head + tokens(6) + long_tail + tokens(980), 14 if number else 0
        ),
        "7,000 tokens, documents shuffled": shuffled,
        "100,000 tokens, new": lambda number: (tokens(100_000), 0),
    }  # fmt: skip


def measure_each(num_remembered: int, length: int) -> None:
    """Processor time of one thread, with nobody beside it."""
    memory = PromptMemory(4 * num_remembered * length)
    remembered: list[list[int]] = []
    before = resident_bytes()
    for number in range(num_remembered):
        prompt = tokens(length)
        if number < NUM_PROMPTS:
            remembered.append(prompt)
        memory.add(f"old-{number}", "client", "chat", "", 0.0, encode(prompt), no_pace)
    grown = (resident_bytes() - before) / (num_remembered * length)
    print(f"{num_remembered} remembered prompts of {length} tokens: {grown:.1f} bytes per token")
    for name, make in loads(remembered).items():
        spent = []
        for number in range(5 if name.startswith("100") else NUM_PROMPTS):
            told = admission(number, make(number))
            began = time.thread_time()
            data = encode(told.prompt_token_ids)
            diagnose(memory, told, data, decode, no_pace)
            memory.add(f"{name} {number}", "client", "chat", "", 0.0, data, no_pace)
            spent.append(time.thread_time() - began)
        print(f"  {name}: {statistics.median(spent) * 1e6:,.0f} µs, at most {max(spent) * 1e6:,.0f} µs")


class Pieces:
    """Processor time between any two lines of Python: within it, no other thread gets the interpreter."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self._began = 0.0
        self._where = ""

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[[FrameType, str, object], Any]:
        spent = time.thread_time() - self._began
        if self._where and spent > self.longest.get(self._where, 0.0):
            self.longest[self._where] = spent
        self._where = f"{frame.f_code.co_name} in {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        self._began = time.thread_time()
        return self.trace


def measure_pieces() -> None:
    """Long prompts that are new, differ, go on, and were shuffled, traced line by line; no garbage is collected."""
    long = tokens(100_000)
    shuffled = [token for part in (3, 1, 2, 0, 5, 4, 9, 8, 7, 6) for token in long[part * 10_000 : (part + 1) * 10_000]]
    prompts: list[Prompt] = [
        (long, 0), (tokens(10) + long, 3), (long[:50_000] + tokens(10) + long[50_000:], 50_000),
        (long + tokens(40), 100_000), (shuffled, 0),
    ]  # fmt: skip
    told = [admission(number, prompt) for number, prompt in enumerate(prompts)]
    memory, pieces = PromptMemory(4_000_000), Pieces()
    gc.collect()
    gc.disable()
    sys.settrace(pieces.trace)
    for each in told:
        data = encode(each.prompt_token_ids)
        diagnose(memory, each, data, decode, no_pace)
        memory.add(each.request_id, "client", "chat", "", 0.0, data, no_pace)
        memory.answered(each.request_id, encode(long[:3000]), no_pace)
    sys.settrace(None)
    gc.enable()
    print("longest pieces of work in which no other thread runs")
    for where, seconds in sorted(pieces.longest.items(), key=lambda piece: -piece[1])[:3]:
        print(f"  {seconds * 1e3:.2f} ms: {where}")


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:]] or [1000, 8000]
    measure_each(*sizes)
    measure_pieces()
