"""Random worlds for the simulator: one seed gives pools, tiers, policies, limits, and the requests that come."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate

from kvd.cache.eviction import POLICIES
from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, KVEviction, Request, SamplingParams
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.rates import Rates

from .fake_runner import Speed
from .fake_tiers import FakeSlowTier
from .truth import STOP_TOKEN, VOCAB_SIZE

FIXED_RATES = (
    # Copying is cheap, so is swapping.
    {"prefill_tokens_per_second": 100.0, "save_bytes_per_second": 1e6, "restore_bytes_per_second": 1e6},
    # Copying costs more than computing.
    {"prefill_tokens_per_second": 1e5, "save_bytes_per_second": 1e3, "restore_bytes_per_second": 1e3},
    {
        "prefill_tokens_per_second": 500.0,
        "decode_base_seconds": 0.02,
        "decode_seconds_per_request": 0.001,
        "disk_bytes_per_second": 1e6,
    },
)
BLOCK_BYTES = 100
"""Of every group: what matters is what it costs beside a token."""


@dataclass
class World:
    """What one seed stands for. A crowded world has long outputs and few blocks, and admits whatever fits by now."""

    seed: int
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = rng = random.Random(self.seed)
        self.depth = rng.randrange(2)
        # A tiered world has few blocks and slots, and many short requests for what lies below them.
        self.is_tiered = rng.random() < 0.25
        self.is_crowded = not self.is_tiered and rng.random() < 0.55
        # An ample world has blocks for everything, and nobody disturbs it: there everything is computed once.
        self.is_ample = not (self.is_crowded or self.is_tiered) and rng.random() < 0.3
        num_groups = rng.choice((1, 1, 2, 3))
        self.windows = [rng.choice((0, 16, 24, 40, 100)) if rng.random() < 0.4 else 0 for _ in range(num_groups)]
        self.windows[0] = 0 if num_groups > 1 or rng.random() < 0.8 else self.windows[0]
        if self.is_ample and rng.random() < 0.7:
            self.windows = [0] * num_groups
        scale = rng.choice((2, 5, 10, 20, 40, 100))
        if self.is_crowded or self.is_tiered:
            scale = rng.choice((8, 12, 18))
        self.num_blocks = [
            300 if self.is_ample else rng.randint(max(1, scale * 2 // 3), scale) for _ in range(num_groups)
        ]
        self.has_ram = self.is_tiered or rng.random() < 0.6
        self.num_ram_slots = [rng.choice((1, 3, 6, 12, 40)) * self.has_ram for _ in range(num_groups)]
        if self.has_ram and not self.is_tiered and rng.random() < 0.1:
            self.num_ram_slots[-1] = 0
        self.slow: FakeSlowTier | None = None
        if self.has_ram and (self.is_tiered or rng.random() < 0.6):
            self.slow = FakeSlowTier(
                rng.randrange(1 << 30),
                failure_rate=rng.choice((0.0, 0.1, 0.3)),
                delay=rng.choice((0.0, 0.5, 0.7)),
                speed=rng.choice((1e3, 1e6)),
            )
        self.config = self._make_config()
        self.fixed_rates = rng.choice((*FIXED_RATES, None, None) if not self.is_tiered else (FIXED_RATES[0], None))
        self.speed = Speed(rng.choice((0.001, 0.02, 0.5)), rng.choice((0.0, 0.01)), rng.choice((1e-4, 0.01)), 0.003)
        self.max_cached = None if self.is_ample or self.is_tiered else rng.choice((None, None, 0, 3, 20))
        self.policy = rng.choice(list(POLICIES))
        self.enable_prefix_caching = self.is_ample or self.is_tiered or rng.random() < 0.85
        # Documents share beginnings, and blocks that mean something else because of what is before them.
        pieces = [[rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)] for _ in range(3)]
        self.documents = [[token for _ in range(20) for token in rng.choice(pieces)] for _ in range(4)]
        self.latest_prompt: list[int] = []
        self.arrival_rate = 0.15 if self.is_crowded else 1.0 if self.is_ample else rng.choice((0.1, 0.4, 1.0))
        self.abort_rate = (
            0.0
            if self.is_ample
            else rng.choice((0.0, 0.05) if self.is_crowded else (0.05, 0.2) if self.is_tiered else (0.0, 0.02, 0.2))
        )
        self.operator_rate = 0.0 if self.is_ample else rng.choice((0.0, 0.02, 0.1))
        # Which blocks are forgotten is counted in the first group, which must have all of them.
        self.forgetting_rate = rng.choice((0.0, 0.0, 0.2, 0.7)) if not self.windows[0] else 0.0
        self.scores = random.Random(f"scores {self.seed}")  # of its own: the other choices stay what they were
        self.scoring_rate = 0.3 if self.seed % 4 == 1 else 0.0
        self.later = random.Random(f"later {self.seed}")  # of its own, likewise
        self.unready_rate = self.later.choice((0.0, 0.1, 0.5)) if self.seed % 3 == 1 else 0.0
        self.output_lengths = (1, 5, 30, 100, 200)
        if self.is_crowded or self.is_tiered:
            self.output_lengths = (100, 200) if self.is_crowded else (1, 2, 5, 20)
        self.priorities = (0,) if self.is_ample else rng.choice(((0,), (0, 0, 1), (-1, 0, 1, 2)))
        self.num_clients = rng.choice((1, 3, 8))
        self.client_weights = list(accumulate(1 / rank for rank in range(1, self.num_clients + 1)))

    def _make_config(self) -> SchedulerConfig:
        rng, is_crowded = self.random, self.is_crowded
        max_num_seqs = rng.choice((3, 5, 8)) if is_crowded else rng.choice((1, 3, 6, 12))
        max_num_seqs = max(max_num_seqs, 3 * self.is_ample)
        lengths = (100, 200, 300) if is_crowded else (300,) if self.is_ample else (20, 100, 200, 300)
        chunks = (0, 1, 4) if is_crowded else (40, 200) if self.is_ample else (0, 5, 16, 40, 200)
        return SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice(chunks),
            max_model_len=rng.choice(lengths),
            max_waiting=30 if self.is_ample else rng.choice((0, 3, 30)),
            queue_timeout_seconds=None if self.is_ample else rng.choice((None, None, 20.0)),
            expected_growth_factor=0.0 if is_crowded else 1.0,
            min_expected_growth_tokens=0 if is_crowded else rng.choice((0, 16, 64)),
            target_gap_seconds=rng.choice((None, None, 0.05, 1.0)),
            is_auto_num_seqs=rng.random() < 0.3,
            max_overtaken=rng.choice((1, 3, 8)),
            default_budget_tokens=rng.choice((None, 64, 80, 128)),
            tool_turn_seconds=rng.choice((1.0, 30.0)),
        )

    def make_cache(self, clock: object) -> CacheManager:
        return CacheManager(
            self.num_blocks,
            key_seed=b"simulation",
            windows=self.windows,
            enable_prefix_caching=self.enable_prefix_caching,
            make_policy=POLICIES[self.policy],
            max_cached_blocks=self.max_cached,
            num_ram_slots=self.num_ram_slots,
            slow_tier=self.slow,
            block_bytes=[BLOCK_BYTES] * len(self.num_blocks),
            clock=clock,
        )

    def make_rates(self) -> Rates:
        return Rates(fixed=self.fixed_rates)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, depth {self.depth}, blocks {self.num_blocks}, windows {self.windows}, "
            f"RAM {self.num_ram_slots}, {'a slow tier' if self.slow else 'no slow tier'}, {self.policy}, "
            f"{'crowded' if self.is_crowded else 'ample' if self.is_ample else 'tiered' if self.is_tiered else 'calm'}"
        )

    # ------------------------------------------------------------------ requests

    def make_request(self, request_id: str, now: float, longest_prompt: int, answers: list[list[int]]) -> Request:
        """`answers`: prompts with their outputs that ended lately, of which the next turn may come."""
        rng = self.random
        prompt = self._make_prompt(longest_prompt, answers)
        self.latest_prompt = prompt
        is_hasty = not self.is_ample and rng.random() < 0.05
        mode: KVEviction = "none"
        if rng.random() < self.forgetting_rate:
            mode = rng.choice(("sliding_window", "streaming", "heavy_hitter"))
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=rng.choice(self.output_lengths),
                stop_token_ids=frozenset({STOP_TOKEN}) if rng.random() < 0.4 else frozenset(),
            ),
            arrival_time=now,
            client=f"client {rng.choices(range(self.num_clients), cum_weights=self.client_weights)[0]}",
            priority=rng.choice(self.priorities),
            cache_salt=rng.choice(("", "", "", "a", "b")),
            deadline=now + rng.choice((1.0, 10.0, 60.0)) if is_hasty else None,
            kv_eviction=mode,
            kv_budget_tokens=rng.choice((None, 64, 70, 100, 200)),
            num_prompt_logprobs=1 if self.scores.random() < self.scoring_rate else None,
        )

    def _make_prompt(self, longest_prompt: int, answers: list[list[int]]) -> list[int]:
        rng = self.random
        document = rng.choice(self.documents)
        longest = rng.choice((20, 60, max(1, min(longest_prompt, 320)), 320))
        prompt = document[: rng.randrange(10, 60) if self.is_crowded else rng.randrange(longest)]
        kind = rng.random()
        if self.is_tiered:
            kind = rng.choice((0.1, 0.5, 0.7, 1.0, 1.0, 1.0))
        if self.is_ample:
            kind = rng.choice((0.1, 0.5, 0.7, 0.7, 0.7, kind))
        if kind < 0.4:
            return prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(20))]
        if kind < 0.6:
            return prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
        if kind < 0.8:  # the same once more, often in the same instant
            return self.latest_prompt
        if kind < 0.9 and answers:
            return [*rng.choice(answers), *[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]]
        return prompt
