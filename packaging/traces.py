"""Synthetic request traces for judging eviction policies: what clients of one workstation send over an hour or two.

A trace is a list of `TracedRequest`s in order of arrival. Tokens are drawn from a counter, so two texts share a token
only where the generator reuses one on purpose (a system prompt, a history, a document). The same seed gives the same
trace on every machine. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """`prompt` arrives at `arrival`; the answer `output` is complete `seconds` later."""

    arrival: float
    prompt: Tokens
    output: Tokens
    seconds: float


class TraceWriter:
    """Draws texts, lengths and gaps for one kind of client."""

    def __init__(self, seed: int, counter: Iterator[int]) -> None:
        self.random = random.Random(seed)
        self._counter = counter

    def text(self, num_tokens: int) -> Tokens:
        """A text that occurs nowhere else."""
        return list(itertools.islice(self._counter, num_tokens))

    def around(self, median: float, spread: float = 0.6) -> float:
        """Log-normal: most values within a factor exp(±spread) of `median`."""
        return self.random.lognormvariate(math.log(median), spread)

    def length(self, median: float, spread: float = 0.6) -> int:
        return 1 + int(min(self.around(median, spread), 8 * median))

    def request(self, arrival: float, prompt: Tokens, num_output: int) -> TracedRequest:
        """An answer at 60 tokens a second, after 0.2 s."""
        return TracedRequest(arrival, prompt, self.text(num_output), 0.2 + num_output / 60)


def chat(writer: TraceWriter, duration: float, num_users: int = 36) -> Iterator[TracedRequest]:
    """Users with growing histories: 1 to about 20 turns, think times around 45 s, three shared system prompts."""
    systems = [writer.text(writer.length(500)) for _ in range(3)]
    for _ in range(num_users):
        time = writer.random.uniform(0, 240)
        while time < duration:
            history = list(writer.random.choice(systems))
            while True:
                is_paste = writer.random.random() < 0.15
                history += writer.text(writer.length(900 if is_paste else 70))
                request = writer.request(time, list(history), writer.length(220))
                yield request
                history += request.output
                time += request.seconds + writer.around(45, 0.8)
                if writer.random.random() < 0.17 or len(history) > 8000 or time > duration:
                    break
            time += writer.around(240, 0.8)


def agents(writer: TraceWriter, duration: float, num_agents: int = 6) -> Iterator[TracedRequest]:
    """Agent loops over a long shared prefix: short gaps between tool calls, side calls, late follow-ups."""
    prefixes = [writer.text(3000), writer.text(2200)]
    title_prefix = writer.text(180)
    for _ in range(num_agents):
        time = writer.random.uniform(0, 60)
        while time < duration:
            prefix = writer.random.choice(prefixes)
            task = writer.text(writer.length(300))
            yield writer.request(time, title_prefix + task[:150], 12)
            history = prefix + task
            num_steps = writer.random.randint(5, 25)
            for step in range(num_steps):
                request = writer.request(time, list(history), writer.length(90))
                yield request
                history += request.output + writer.text(min(writer.length(350, 0.9), 3000))
                time += request.seconds + (writer.around(40) if writer.random.random() < 0.08 else writer.around(2))
                if writer.random.random() < 0.05:
                    yield from _sub_agent(writer, time, prefix)
                if len(history) > 10000 or time > duration:
                    break
                if step and writer.random.random() < 0.06:
                    time += writer.around(150)  # a person reads, then asks for more
                    history += writer.text(writer.length(60))
            time += writer.around(120)


def _sub_agent(writer: TraceWriter, time: float, prefix: Tokens) -> Iterator[TracedRequest]:
    history = prefix + writer.text(writer.length(200))
    for _ in range(writer.random.randint(2, 5)):
        request = writer.request(time, list(history), writer.length(80))
        yield request
        history += request.output + writer.text(writer.length(300))
        time += request.seconds + writer.around(2)


def retrieval(writer: TraceWriter, duration: float, num_documents: int = 120) -> Iterator[TracedRequest]:
    """Questions over 3 or 4 documents out of a Zipf distribution; in half of the prompts their order varies."""
    system = writer.text(250)
    documents = [writer.text(writer.length(600, 0.4)) for _ in range(num_documents)]
    weights = [1 / (rank + 1) for rank in range(num_documents)]
    time = 0.0
    while True:
        time += writer.random.expovariate(1 / 8)
        if time > duration:
            return
        chosen: dict[int, None] = {}
        while len(chosen) < 3 + (writer.random.random() < 0.5):
            chosen.setdefault(writer.random.choices(range(num_documents), weights)[0])
        order = list(chosen)
        if writer.random.random() < 0.5:
            order.sort()
        prompt = list(system)
        for number in order:
            prompt += documents[number]
        yield writer.request(time, prompt + writer.text(writer.length(40)), writer.length(150))


def scans(writer: TraceWriter, duration: float) -> Iterator[TracedRequest]:
    """Now and then a batch of long prompts that never come back, with one short instruction in common."""
    instruction = writer.text(60)
    time = writer.around(100)
    while time < duration:
        for _ in range(writer.random.randint(3, 8)):
            prompt = instruction + writer.text(min(writer.length(4500, 0.4), 8000))
            request = writer.request(time, prompt, writer.length(200))
            yield request
            time += request.seconds + 0.5
        time += writer.around(200, 0.4)


Workload = Callable[[TraceWriter, float], Iterable[TracedRequest]]
MIXES: dict[str, tuple[Workload, ...]] = {
    "chat": (chat,),
    "agents": (agents,),
    "rag": (retrieval,),
    "chat + scans": (chat, scans),
    "mix": (chat, agents, retrieval, scans),
}


def make_trace(name: str, seed: int, duration: float = 1800.0) -> list[TracedRequest]:
    """The trace `name` of `MIXES` over `duration` seconds of arrivals, in order of arrival."""
    counter = itertools.count()
    requests: list[TracedRequest] = []
    for number, workload in enumerate(MIXES[name]):
        requests += workload(TraceWriter(seed * 1009 + number, counter), duration)
    return sorted(requests, key=lambda request: request.arrival)
