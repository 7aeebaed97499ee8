"""Measures how long the dashboard holds up the event loop, page by page, in a real terminal.

    python packaging/measure_dashboard.py [PAGE ...] [--seconds 20] [--size 160x50] [--requests 500] [--blocks 50000]

Each page runs in a process of its own on a pseudo terminal, over a console whose answers were made before, so that what
is measured is the dashboard alone. Every callback of the loop is timed, on the clock and in processor time of its
thread: on a machine that does other things too, only the second is the dashboard's. The first seconds, in which the
screens are built, are not counted. The same again while keys are pressed, once every tenth of a second.

A collection of garbage comes when it comes, whoever allocates; its time is taken off, and told as `gc`.

What shares a core or its caches makes the same work take longer even in processor time. `noise` tells by how much: the
longest time over the median of a loop of arithmetic that runs now and then beside the dashboard.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvd.core import BLOCK_SIZE  # noqa: E402
from kvd.insight import DoctorReport, Finding, Miss, Timeline, TimelineEntry  # noqa: E402
from kvd.tools.serve import SWITCH_INTERVAL_SECONDS  # noqa: E402
from kvd.tui.app import PAGES, Dashboard  # noqa: E402
from kvd.views import Counters, DiskFacts, LogEvent, PrefixView, Snapshot, StepMix  # noqa: E402
from tests.tui.fakes import INFO, FakeConsole, block_map, histogram, row, snapshot  # noqa: E402

LIMIT_SECONDS = 0.002
INTERVAL_SECONDS = 0.1  # the shortest that the keys allow
WARM_UP_SECONDS = 3.0
CONTROL_SECONDS = 0.05
NUM_STATES = 50
KEYS = ("j", "j", "k", "\x1b[6~", "\x1b[5~", "G", "g", "\x1b[C", "r", "\x1b[D", "l", "v", "\x1b")


@dataclass(slots=True)
class Stretches:
    """What the callbacks of one phase took."""

    num: int = 0
    num_painting: int = 0  # of these, those that took a tenth of the limit or more
    painting_median: float = 0.0  # of them, in processor time
    painting_rare: float = 0.0  # that one in a hundred of them exceeds
    longest_cpu: float = 0.0
    longest_wall: float = 0.0
    num_over: int = 0  # in processor time, beyond the limit
    name: str = ""  # of the longest
    longest_collection: float = 0.0  # of garbage, in seconds of processor time; no part of the above but of wall
    control: float = 1.0  # longest over median of a piece of arithmetic that is always the same

    def add(self, cpu: float, wall: float, name: str) -> None:
        self.num += 1
        self.num_over += cpu > LIMIT_SECONDS
        self.longest_wall = max(self.longest_wall, wall)
        if cpu > self.longest_cpu:
            self.longest_cpu, self.name = cpu, name

    def summarise(self, painting: list[float]) -> None:
        """Take in the processor times of the callbacks that did something."""
        painting.sort()
        self.num_painting = len(painting)
        self.painting_median = statistics.median(painting or [0.0])
        self.painting_rare = painting[len(painting) * 99 // 100] if painting else 0.0


# --------------------------------------------------------------------------- an engine that is busy


class RecordedConsole(FakeConsole):
    """Answers with states that were made before, one after the other."""

    def __init__(self, num_requests: int, num_blocks: int) -> None:
        self._states = [_state(step, num_requests, num_blocks) for step in range(NUM_STATES)]
        super().__init__(self._states[0])
        self.block_maps = {}
        self._maps: dict[int, list[object]] = {}
        self._num_blocks = num_blocks
        self.cached_prefixes = tuple(
            PrefixView(f"{i:064x}", 4096 - i, 500 - i, i % 9 == 0, i % 3 == 0, f"client-{i % 12}", 3600.0, i * 2.0)
            for i in range(200)
        )
        self.log = tuple(
            LogEvent(1.7e9 + i, ("info", "warning", "debug")[i % 3], "admitted", f"event number {i}", f"id-{i}")  # type: ignore[arg-type]
            for i in range(2000)
        )
        self.report = _report()
        self.known_timelines = {request.request_id: _timeline(request.request_id) for request in self.current.requests}

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        self.num_calls += 1
        state = self._states[self.num_calls % NUM_STATES]
        counters = replace(
            state.counters,
            num_steps=self.num_calls * 30,
            generation_tokens=self.num_calls * 1500,
            prefill_tokens_computed=self.num_calls * 9000,
            prefix_query_tokens=self.num_calls * 12_000,
            prefix_hit_tokens=self.num_calls * 5_000,
        )
        return replace(state, time=time.monotonic(), counters=counters, requests=state.requests if details else ())

    async def block_map(self, max_cells: int, group_id: int = 0):  # type: ignore[no-untyped-def]
        if max_cells not in self._maps:
            self._maps[max_cells] = [
                block_map(
                    num_blocks=self._num_blocks,
                    num_cells=max_cells,
                    num_active=self._num_blocks * (40 + step) // 100,
                    num_cached=self._num_blocks * 30 // 100,
                )
                for step in range(10)
            ]
        return self._maps[max_cells][self.num_calls % 10]


def _state(step: int, num_requests: int, num_blocks: int) -> Snapshot:
    requests = tuple(
        row(
            i,
            client=f"client-{i % 12}",
            num_output_tokens=(step * 3 + i) % 512,
            num_blocks=78 + step % 7,
            age_seconds=1000.0 - i + step * 0.1,
            tokens_per_second=20.0 + (i * 7 + step) % 13,
        )
        for i in range(num_requests)
    )
    active = num_blocks * (40 + step) // 100
    cached = num_blocks * 30 // 100
    return snapshot(
        info=replace(INFO, budget=replace(INFO.budget, num_blocks=num_blocks)),
        num_blocks=num_blocks,
        active=active,
        cached=cached,
        requests=requests,
        counters=Counters(num_preemptions=step, num_evicted_blocks=step * 40, recomputed_tokens=step * 100),
        last_step=StepMix(num_requests, 300 + step, num_requests, 0.03 + step / 1000),
        step_budget=2048,
        running_limit=num_requests,
        num_ram_blocks=num_blocks * 2,
        num_ram_blocks_used=num_blocks + step * 10,
        disk=DiskFacts(num_blocks, num_blocks * BLOCK_SIZE * 700, num_blocks * BLOCK_SIZE * 1400),
        misses=(("volatile_line", 14, 14_321 + step), ("evicted", 2, 900)),
        histograms={
            name: histogram([0.001 * (i % 90) for i in range(200 + 5 * step)])
            for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds")
        },
    )


def _report() -> DoctorReport:
    causes = ("volatile_line", "differs", "reordered", "evicted", "white_space")
    findings = tuple(
        Finding(
            causes[i % 5], f"client-{i}", "chat", 40, 90_000 - i, 12.0, 14, "what happened", "what to do", f"id-{i}"
        )  # type: ignore[arg-type]
        for i in range(50)
    )
    recent = tuple(
        Miss(f"id-{i}", f"client-{i % 12}", "chat", 1.7e9, causes[i % 5], 2000, 100, 1500, 14, 3, "what happened")  # type: ignore[arg-type]
        for i in range(200)
    )
    return DoctorReport(findings, recent, 5000, 3, 900_000, 300_000, 200_000, 2500.0, 1.5, (("volatile_line", 40, 90),))


def _timeline(request_id: str) -> Timeline:
    entries = tuple(TimelineEntry(0.1 * i, "chunk", 256, f"chunk {i} of 60") for i in range(60))
    return Timeline(request_id, "client-1", "chat", 1.7e9, 4096, False, (TimelineEntry(0.0, "queued", 4096), *entries))


# --------------------------------------------------------------------------- the measured process


async def measure(page: str, seconds: float, num_requests: int, num_blocks: int, results: int) -> None:
    """Show one page; writes the figures of the quiet and of the pressed phase to a file descriptor."""
    dashboard = Dashboard(
        RecordedConsole(num_requests, num_blocks),
        address="http://127.0.0.1:8000/v1",
        model="smollm2-135m-instruct",
        on_quit="close",
        interval_seconds=INTERVAL_SECONDS,
    )
    phase = Stretches()
    painting: list[float] = []
    run = asyncio.Handle._run

    collecting = [0.0, 0.0]  # processor time at the start of a collection, and of those in this callback

    def collected(stage: str, details: object) -> None:
        if stage == "start":
            collecting[0] = time.thread_time()
        else:
            collecting[1] += time.thread_time() - collecting[0]
            phase.longest_collection = max(phase.longest_collection, time.thread_time() - collecting[0])

    def timed(handle: asyncio.Handle) -> None:
        collecting[1] = 0.0
        wall, cpu = time.perf_counter(), time.thread_time()
        run(handle)
        spent = time.thread_time() - cpu - collecting[1]
        if spent >= LIMIT_SECONDS / 10:
            painting.append(spent)
        phase.add(spent, time.perf_counter() - wall, _name(handle) if spent > phase.longest_cpu else "")

    def write(line: object) -> None:
        os.write(results, json.dumps(line).encode() + b"\n")

    async def watch() -> None:
        nonlocal phase
        await asyncio.sleep(1.0)
        dashboard.show_page(next(shown for shown in dashboard.pages if shown.title == page))
        await asyncio.sleep(WARM_UP_SECONDS)
        for name in ("quiet", "keys"):
            write(f"begin {name}")
            phase = Stretches()
            painting.clear()
            controls = []
            for _ in range(round(seconds / CONTROL_SECONDS)):
                await asyncio.sleep(CONTROL_SECONDS)
                controls.append(_control())
            phase.summarise(painting)
            phase.control = max(controls) / statistics.median(controls)
            write({name: asdict(phase)})
        dashboard.exit("close")

    # As `kvd serve` does; what was made above is no work for the collector that a real server would not have.
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(collected)
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    watching = asyncio.create_task(watch())
    await dashboard.run_async()
    await watching


def _control() -> float:
    """Processor time of a third of a millisecond of arithmetic."""
    started = time.thread_time()
    sum(number * number for number in range(5000))
    return time.thread_time() - started


def _name(handle: asyncio.Handle) -> str:
    callback = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        # The innermost coroutine says more than `process_messages`, which is what every widget runs.
        coroutine = task.get_coro()
        return f"{getattr(coroutine, '__qualname__', coroutine)} of {task.get_name()}"
    return getattr(callback, "__qualname__", repr(callback))


# --------------------------------------------------------------------------- the terminal around it


def run_page(page: str, arguments: argparse.Namespace) -> dict[str, Stretches]:
    """One page in a process of its own on a terminal of its own."""
    columns, rows = (int(number) for number in arguments.size.split("x"))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    reading, writing = os.pipe()
    command = [
        sys.executable, __file__, page, "--child", str(writing), "--seconds", str(arguments.seconds),
        "--requests", str(arguments.requests), "--blocks", str(arguments.blocks),
    ]  # fmt: skip
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, pass_fds=(writing,), env=environment, cwd=ROOT
    )
    os.close(slave)
    os.close(writing)
    threading.Thread(target=_drain, args=(master,), daemon=True).start()
    found: dict[str, Stretches] = {}
    pressing = threading.Event()
    with os.fdopen(reading, encoding="utf-8") as lines:
        for line in lines:
            message = json.loads(line)
            if message == "begin keys":
                threading.Thread(target=_press, args=(master, pressing), daemon=True).start()
            elif isinstance(message, dict):
                found.update({name: Stretches(**figures) for name, figures in message.items()})
    pressing.set()
    child.wait()
    os.close(master)
    return found


def _drain(master: int) -> None:
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:
        return  # the terminal is closed


def _press(master: int, is_over: threading.Event) -> None:
    number = 0
    while not is_over.wait(0.1):
        try:
            os.write(master, KEYS[number % len(KEYS)].encode())
        except OSError:
            return  # the terminal is closed
        number += 1


def main(words: Sequence[str]) -> int:
    """Print a line for each page; 1 where a page takes longer than allowed while nobody touches it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=", ".join(page.title for page in PAGES))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", default="160x50")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    titles = [page.title for page in PAGES]
    unknown = [page for page in arguments.pages if page not in titles]
    if unknown:
        parser.error(f"there is no page {unknown[0]}; there are {', '.join(titles)}")
    if arguments.child is not None:
        asyncio.run(
            measure(arguments.pages[0], arguments.seconds, arguments.requests, arguments.blocks, arguments.child)
        )
        return 0
    print(f"{arguments.requests} requests, {arguments.blocks:,} blocks, {arguments.size}, a poll every 0.1 s")
    print("processor time in ms of callbacks that take 0.2 ms or more; of all: wall, those above 2 ms, garbage, noise")
    print("page      phase  number  median     99%  longest    wall  > 2 ms      gc  noise  the longest is")
    worst = 0.0
    for page in arguments.pages or titles:
        for phase, found in run_page(page, arguments).items():
            figures = (found.painting_median, found.painting_rare, found.longest_cpu, found.longest_wall)
            print(
                f"{page:<9} {phase:<5} {found.num_painting:>7,}"
                + "".join(f"{seconds * 1e3:>8.2f}" for seconds in figures)
                + f"{found.num_over:>8}{found.longest_collection * 1e3:>8.2f}{found.control:>6.1f}×  {found.name}",
                flush=True,
            )
            worst = max(worst, found.longest_cpu if phase == "quiet" else 0.0)
    return 1 if worst > LIMIT_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
