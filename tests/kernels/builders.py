"""Inputs made from cases: weights, caches full of garbage, block tables in shuffled order, batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvd_kernels.kv_format import BLOCK_TOKENS, GroupFormat, KVFormat, LayerFormat, build_kv_format
from kvd_kernels.ops import AttentionSpec, Batch, GroupTables, KVCache, RopeTable
from kvd_kernels.weights import FloatWeight, Int4Weight, Int8Weight, Linear, WeightMatrix
from tests.kernels.cases import AttentionCase, LinearCase
from tests.kernels.oracle import LayerBytes

SENTINEL = -77.0
"""What rows beyond the live ones hold before and after an op."""
EXTRA_ROWS = 3
MAX_POSITIONS = 2048
LAYER = 5
"""The layer under test; the pool holds two more of its group, and another group exists beside it."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_weight(form: str, group: int, num_outputs: int, num_inputs: int, random: torch.Generator) -> WeightMatrix:
    group = group or num_inputs
    shape = (num_outputs, num_inputs // group)
    if form == "int4":
        codes = torch.randint(0, 256, (num_outputs, num_inputs // 2), generator=random, dtype=torch.uint8)
        scales = (torch.rand(shape, generator=random) * 0.02 + 0.005).half()
        # Offsets are no multiples of the scale, as in Q4_1.
        offsets = (-(torch.rand(shape, generator=random) * 4 + 5.5) * scales.float()).half()
        return Int4Weight(codes, scales, offsets, group)
    if form == "int8":
        codes = torch.randint(-127, 128, (num_outputs, num_inputs), generator=random, dtype=torch.int8)
        return Int8Weight(codes, (torch.rand(shape, generator=random) * 0.002 + 0.0005).half(), group)
    values = torch.randn(num_outputs, num_inputs, generator=random) * 0.1
    return FloatWeight(values.to({"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[form]))


def make_linear(case: LinearCase, seed: int = 0) -> Linear:
    random = generator(seed)
    parts = tuple(make_weight(form, group, n, case.num_inputs, random) for form, group, n in case.parts)
    num_outputs = sum(part.num_outputs for part in parts)
    return Linear(parts, torch.randn(num_outputs, generator=random) if case.bias else None)


def make_rows(n: int, width: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """n rows of different magnitudes with a few outliers; the first has zeros where a whole group may lie."""
    random = generator(seed)
    x = torch.randn(n, width, generator=random) * torch.exp(torch.randn(n, 1, generator=random))
    x *= torch.where(torch.rand(n, width, generator=random) < 0.01, 12.0, 1.0)
    if n:
        x[0, : width // 2] = 0
    return x.clamp_(-1000, 1000).to(dtype)


def make_out(n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((n + EXTRA_ROWS, width), SENTINEL, dtype=dtype)


def assert_rest_untouched(out: torch.Tensor, n: int) -> None:
    assert bool((out[n:] == SENTINEL).all()), "a row beyond the live ones was written"


def make_rope(head_dim: int, *, partial: bool = False) -> RopeTable:
    rotary_dim = head_dim // 2 if partial else head_dim
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * frequencies
    return RopeTable(angles.cos().float(), angles.sin().float())


@dataclass
class AttentionInputs:
    """Everything that `rope_and_write` and `attend` take, and what the oracle needs beside it."""

    case: AttentionCase
    batch: Batch
    cache: KVCache
    spec: AttentionSpec
    rope: RopeTable
    layer: LayerFormat
    q: torch.Tensor  # float32 [tokens, heads · head_dim], after RoPE
    tables: list[list[int]]  # physical blocks per sequence
    first_positions: list[list[int]]
    num_slots: list[int]

    def layer_bytes(self) -> LayerBytes:
        pool = self.cache.pools[self.spec.group.group_id]
        return LayerBytes(pool.numpy(), self.spec.group, LAYER, self.layer)

    def live_slots(self) -> list[np.ndarray]:
        """Per sequence (block · 16 + token) of every slot in use."""
        result = []
        for table, count in zip(self.tables, self.num_slots, strict=True):
            slots = (np.array(table, np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
            result.append(slots[:count])
        return result


def make_format(case: AttentionCase) -> tuple[KVFormat, GroupFormat, LayerFormat]:
    """Two groups; the layer under test is neither the first nor the last of its own."""
    layer = LayerFormat(
        case.num_kv_heads, case.head_dim, case.element, case.element,
        rotated=case.rotated, bias_free=case.key_bias > 0,
    )  # fmt: skip
    plain = LayerFormat(case.num_kv_heads, case.head_dim, "fp16", "int8")
    other_window = 999
    layers = [(other_window, plain)] * (LAYER + 3)
    for index, section in ((LAYER - 2, plain), (LAYER, layer), (LAYER + 2, layer)):
        layers[index] = (case.window, section)
    kv_format = build_kv_format(layers)
    group, _ = kv_format.locate(LAYER)
    return kv_format, group, layer


def _fill_garbage(pool: torch.Tensor, random: torch.Generator) -> None:
    """Random bytes, among them 16-bit NaN and infinities: what no live slot names must not matter."""
    pool.random_(0, 256, generator=random)
    pool[:, 1::2] |= 0x7C


def _store_random(inputs: AttentionInputs, random: torch.Generator) -> None:
    """Random K and V into every slot in use, through the index formulas."""
    access = inputs.layer_bytes()
    k_at, v_at, scale_at = access.indices()
    slots = np.unique(np.concatenate(inputs.live_slots())) if inputs.tables else np.zeros(0, np.int64)
    blocks, tokens = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    shape = (len(slots), inputs.layer.num_kv_heads, inputs.layer.head_dim)
    for elements, scales, at in (
        (access.k_elements(), access.k_scales(), k_at),
        (access.v_elements(), access.v_scales(), v_at),
    ):
        values = torch.randn(shape, generator=random)
        if inputs.layer.k_type == "int8":
            scale = (values.abs().amax(2) / 127).half()
            scales[blocks[:, None], scale_at[tokens]] = scale.numpy()
            stored = torch.round(values / scale.float()[:, :, None]).clamp(-127, 127).to(torch.int8).numpy()
        elif inputs.layer.k_type == "fp16":
            stored = values.half().numpy()
        elif inputs.layer.k_type == "bf16":
            stored = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            dtype = torch.float8_e4m3fn if inputs.layer.k_type == "fp8_e4m3" else torch.float8_e5m2
            stored = values.to(dtype).view(torch.uint8).numpy()
        elements[blocks[:, None, None], at[tokens]] = stored


def make_attention(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """Tables in shuffled order over a pool of garbage in which only the slots in use hold numbers."""
    random = generator(seed)
    kv_format, group, layer = make_format(case)
    logical = []  # per sequence the block indices of its table: position // 16
    for before, new in case.sequences:
        last = (before + new - 1) // BLOCK_TOKENS
        logical.append([b for b in range(last + 1) if b == last or b not in case.holes])
    num_needed = sum(len(entries) for entries in logical) + 5
    permutation = torch.randperm(num_needed, generator=random).tolist()
    num_shared = min((before for before, _ in case.sequences), default=0) // BLOCK_TOKENS if case.shared else 0
    common = [permutation.pop() for _ in range(num_shared)]
    tables = [[common[i] if i < num_shared else permutation.pop() for i in range(len(entries))] for entries in logical]
    first_positions = [[b * BLOCK_TOKENS for b in entries] for entries in logical]
    num_slots = [
        (len(entries) - 1) * BLOCK_TOKENS + (before + new - 1) % BLOCK_TOKENS + 1
        for entries, (before, new) in zip(logical, case.sequences, strict=True)
    ]
    batch = make_batch(case, group, tables, first_positions, num_slots)
    pools = tuple(torch.empty(num_needed, each.block_bytes, dtype=torch.uint8) for each in kv_format.groups)
    for pool in pools:
        _fill_garbage(pool, random)
    key_bias = None
    if case.key_bias:
        key_bias = torch.randn(case.num_kv_heads, case.head_dim, generator=random) * case.key_bias
    spec = AttentionSpec(LAYER, group, case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, key_bias)
    q = torch.randn(batch.num_tokens, case.num_heads * case.head_dim, generator=random)
    rope = make_rope(case.head_dim, partial=case.partial_rotary)
    inputs = AttentionInputs(
        case, batch, KVCache(kv_format, pools), spec, rope, layer, q, tables, first_positions, num_slots
    )
    _store_random(inputs, random)
    return inputs


def make_batch(
    case: AttentionCase,
    group: GroupFormat,
    tables: list[list[int]],
    first_positions: list[list[int]],
    num_slots: list[int],
) -> Batch:
    """Buffers larger than the live part; what lies beyond is nonsense that would show."""
    num_seqs = len(case.sequences)
    width = max((len(table) for table in tables), default=0) + 2
    lengths = [new for _, new in case.sequences]
    num_tokens = sum(lengths)
    block_tables = torch.full((num_seqs + 2, width), 2**30, dtype=torch.int32)
    first = torch.full((num_seqs + 2, width), -5, dtype=torch.int32)
    slots = torch.full((num_seqs + 2,), 12345, dtype=torch.int32)
    write_slots = torch.full((num_tokens + EXTRA_ROWS,), 2**40, dtype=torch.int64)
    positions = torch.full((num_tokens + EXTRA_ROWS,), 2**30, dtype=torch.int32)
    token = 0
    for s, (before, new) in enumerate(case.sequences):
        block_tables[s, : len(tables[s])] = torch.tensor(tables[s], dtype=torch.int32)
        first[s, : len(tables[s])] = torch.tensor(first_positions[s], dtype=torch.int32)
        slots[s] = num_slots[s]
        for position in range(before, before + new):
            positions[token] = position
            block = position // BLOCK_TOKENS * BLOCK_TOKENS
            if block in first_positions[s]:
                physical = tables[s][first_positions[s].index(block)]
                write_slots[token] = physical * BLOCK_TOKENS + position % BLOCK_TOKENS
            token += 1
    query_starts = torch.full((num_seqs + 3,), -9, dtype=torch.int32)
    query_starts[: num_seqs + 1] = torch.tensor([0, *lengths]).cumsum(0)
    live = GroupTables(block_tables, first, slots, write_slots)
    # The other group's tables are nonsense too: an op that reads them instead of its own fails.
    nonsense = replace(live, block_tables=torch.full_like(block_tables, 2**30))
    groups = tuple(live if i == group.group_id else nonsense for i in range(2))
    logit_rows = (query_starts[1 : num_seqs + 1] - 1).long()
    return Batch(
        torch.zeros(num_tokens + EXTRA_ROWS, dtype=torch.int64), positions, query_starts, logit_rows, groups,
        num_tokens, num_seqs, num_seqs,
    )  # fmt: skip
