"""What the prefix doctor costs: processor time per prompt, memory, and for how long it keeps other threads waiting.

python packaging/measure_doctor.py [number of remembered prompts] [their length]
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence

from kvd.insight import Admission
from kvd.observe.doctor import Doctor
from kvd.observe.doctor_causes import diagnose
from kvd.observe.doctor_memory import PromptMemory
from kvd.observe.doctor_passages import encode

VOCABULARY = 49_000
SWITCH_INTERVAL_SECONDS = 0.0002
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


def longest_pause(seconds: float) -> list[float]:
    """Milliseconds between the turns of a thread that only looks at the clock: median, 99.9%, longest."""
    pauses = []
    end = last = time.perf_counter()
    end += seconds
    while last < end:
        now = time.perf_counter()
        pauses.append(now - last)
        last = now
    pauses.sort()
    picked = pauses[len(pauses) // 2], pauses[int(len(pauses) * 0.999)], pauses[-1]
    return [pause * 1e3 for pause in picked]


def measure_others() -> None:
    """What another thread notices of a doctor that works all the time."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    print("pauses of another thread in ms (median, 99.9%, longest)")
    print("  nobody works:", *(f"{pause:.3f}" for pause in longest_pause(5.0)))
    doctor = Doctor(decode, share=1.0)
    told = [admission(number, (tokens(length), 0)) for number, length in enumerate([1000, 8000, 60_000] * 10)]
    is_over = threading.Event()

    def hand_over() -> None:
        while not is_over.is_set():
            doctor.admitted(told)
            doctor.wait(60.0)

    thread = threading.Thread(target=hand_over)
    thread.start()
    print("  the doctor works:", *(f"{pause:.3f}" for pause in longest_pause(5.0)))
    is_over.set()
    thread.join()
    doctor.close()


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:]] or [1000, 8000]
    measure_each(*sizes)
    measure_others()
