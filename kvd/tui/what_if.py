"""What would fit under other settings: the state of the what-if page and its lines, by the arithmetic of `kvd plan`.

Owner: the event loop. `WhatIf` holds what the operator tries; everything else is a pure function of it. Invariant:
nothing in here changes the engine, and no answer differs from what start-up would say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kvd.cache.fitting import Fit, fit, fits_by_concurrency
from kvd.cache.lengths import Advice, SeenLengths, advise
from kvd.cache.sizing import request_blocks
from kvd.geometry import Choice, Geometry
from kvd.tui.format import exact

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARE_STEP = 0.05

_fits = lru_cache(maxsize=64)(fit)
_rows = lru_cache(maxsize=64)(fits_by_concurrency)


@dataclass(frozen=True, slots=True)
class Cell:
    """So many requests of so many tokens. share: of the pool that they would take; None: the model knows no such
    context, or there is no pool."""

    num_requests: int
    num_tokens: int
    fits: bool
    share: float | None
    kv_bytes: int


class WhatIf:
    """What is tried: settings, and the cell that is looked at."""

    def __init__(self) -> None:
        self.geometry: Geometry | None = None
        self.served_len = 0
        self._tried: Choice | None = None
        self.tokens = 0
        self.requests = 0

    def put(self, geometry: Geometry | None, served_len: int) -> None:
        """The engine that is looked at; what was tried is forgotten when it is another one, or has other settings."""
        if geometry == self.geometry and served_len == self.served_len:
            return
        self.geometry, self.served_len = geometry, served_len
        self._tried = None
        if geometry is not None:
            self.tokens, self.requests = served_len, geometry.choice.max_num_seqs

    @property
    def now(self) -> Choice:
        """The settings that the engine runs with."""
        assert self.geometry is not None
        return self.geometry.choice

    @property
    def tried(self) -> Choice:
        return self._tried or self.now

    @property
    def is_as_now(self) -> bool:
        return self.tried == self.now

    @property
    def fits(self) -> Fit:
        """Of what is tried."""
        assert self.geometry is not None
        return _fits(self.geometry, self.tried)

    @property
    def unasked(self) -> Fit:
        """Of what is tried, without a max_model_len."""
        assert self.geometry is not None
        return _fits(self.geometry, replace(self.tried, max_model_len=None))

    def by_dtype(self) -> tuple[tuple[str, Fit], ...]:
        """What is tried with every KV dtype that the backend serves, without a max_model_len."""
        geometry = self.geometry
        assert geometry is not None
        return tuple(
            (dtype, _fits(geometry, replace(self.tried, kv_cache_dtype=dtype, max_model_len=None)))
            for dtype in geometry.kv_dtypes
        )

    # ------------------------------------------------------------------ trying

    def turn_dtype(self) -> None:
        """The next KV dtype that this backend serves."""
        assert self.geometry is not None
        dtypes = self.geometry.kv_dtypes
        here = dtypes.index(self.tried.kv_cache_dtype) if self.tried.kv_cache_dtype in dtypes else -1
        self._tried = replace(self.tried, kv_cache_dtype=dtypes[(here + 1) % len(dtypes)])

    def change_share(self, steps: int) -> str:
        """A larger or smaller share of the memory; what then no longer counts, in words."""
        share = round(min(1.0, max(SHARE_STEP, self.tried.share + steps * SHARE_STEP)), 4)
        exact_size = next(
            (
                name
                for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes")
                if getattr(self.tried, name) is not None
            ),
            "",
        )
        self._tried = replace(self.tried, share=share, kv_cache_memory_bytes=None, num_gpu_blocks_override=None)
        return f"{exact_size} is left out: the share decides" if exact_size else ""

    def try_cell(self) -> None:
        """Ask for the context and the number of requests that are looked at."""
        assert self.geometry is not None
        length = min(self.tokens, self.geometry.shape.max_positions)
        self._tried = replace(self.tried, max_model_len=length, max_num_seqs=self.requests)

    def undo(self) -> None:
        """Back to the settings that the engine runs with."""
        self._tried = None
        self.tokens, self.requests = self.served_len, self.now.max_num_seqs

    def flags(self) -> str:
        """What is tried, as flags of `kvd serve`: only what differs from now; all of it where nothing does."""
        now, tried = self.now, self.tried
        assert self.geometry is not None
        named = [
            ("kv-cache-dtype", tried.kv_cache_dtype, now.kv_cache_dtype),
            (self.geometry.room.setting.replace("_", "-"), f"{tried.share:g}", f"{now.share:g}"),
            ("max-model-len", tried.max_model_len, now.max_model_len),
            ("max-num-seqs", tried.max_num_seqs, now.max_num_seqs),
        ]
        changed = [(name, value) for name, value, before in named if value != before or self.is_as_now]
        return " ".join(f"--{name} {value}" for name, value in changed if value is not None)

    # ------------------------------------------------------------------ the grid

    def contexts(self, most: int) -> tuple[int, ...]:
        """Columns, at most `most`: round lengths, the model's longest, the served one and the one that is tried."""
        assert self.geometry is not None
        longest = self.geometry.shape.max_positions
        needed = {self.served_len, min(self.tried.max_model_len or longest, longest), longest} - {0}
        return _chosen(needed, [length for length in CONTEXTS if length < longest], most)

    def counts(self, most: int) -> tuple[int, ...]:
        """Rows, at most `most`: round numbers, what runs now and what is tried."""
        return _chosen({self.now.max_num_seqs, self.tried.max_num_seqs, 1}, list(COUNTS), most, is_low_first=True)

    def row(self, num_requests: int, contexts: tuple[int, ...]) -> tuple[Cell, ...]:
        assert self.geometry is not None
        (found,) = _rows(self.geometry, self.tried, (num_requests,))
        cells = []
        for length in contexts:
            blocks = num_requests * request_blocks(length, found.most_tokens)
            share = blocks / found.num_blocks if found.num_blocks and length <= found.max_positions else None
            fits = found.requests(length) >= num_requests
            cells.append(Cell(num_requests, length, fits, share, blocks * found.block_bytes))
        return tuple(cells)

    def move(self, columns: int, rows: int, shown: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        """Look at another cell of those that are shown: (contexts, counts)."""
        contexts, counts = shown
        self.tokens = _moved(self.tokens, columns, contexts)
        self.requests = _moved(self.requests, rows, counts)

    def look(self, shown: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, int]:
        """(context, count) of the cell that is looked at: the nearest that is shown."""
        contexts, counts = shown
        return _nearest(self.tokens, contexts), _nearest(self.requests, counts)

    # ------------------------------------------------------------------ advice

    def advice(self, seen: SeenLengths | None) -> Advice:
        """As `kvd plan` has it."""
        assert self.geometry is not None
        return advise(self.geometry, self.unasked, seen)


def seen_words(seen: SeenLengths) -> str:
    """The lengths that were seen: p50, p90 and p99."""

    def words(name: str) -> str:
        return f"{exact(getattr(seen.prompt, name))}+{exact(getattr(seen.answer, name))}"

    return f"{words('p50')}, {words('p90')}, {words('p99')}"


def short_tokens(num_tokens: int) -> str:
    """`512`, `8K`, `40,960`: a context in few letters, K being 1,024."""
    if num_tokens >= 1024 and num_tokens % 1024 == 0:
        return f"{num_tokens // 1024}K"
    return exact(num_tokens)


def _chosen(needed: set[int], others: list[int], most: int, *, is_low_first: bool = False) -> tuple[int, ...]:
    """`needed`, and as many of the others as there is room for: the largest first, or the smallest."""
    kept = sorted(needed)[-max(1, most) :]
    room = most - len(kept)
    rest = [value for value in others if value not in kept]
    extra = rest[: max(0, room)] if is_low_first else rest[max(0, len(rest) - max(0, room)) :]
    return tuple(sorted({*kept, *extra}))


def _nearest(value: int, shown: tuple[int, ...]) -> int:
    return min(shown, key=lambda each: (abs(each - value), each))


def _moved(value: int, steps: int, shown: tuple[int, ...]) -> int:
    index = shown.index(_nearest(value, shown))
    return shown[min(len(shown) - 1, max(0, index + steps))]
