"""What the shared suites leave open of the GPU's attention: packed conversions, grids of a graph, ends of ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvd_kernels.ops import Ops
from kvd_kernels.triton import attention, attention_configs, attention_tiles
from kvd_kernels.triton.attention_configs import MAX_SPLITS, MIN_SPLIT_SLOTS
from kvd_kernels.triton.cards import KNOWN_CARDS
from tests.kernels import cases
from tests.kernels.builders import AttentionInputs, make_attention, make_out
from tests.kernels.cases import AttentionCase
from tests.kernels.checks import check_attention, expected_attention
from tests.kernels.compare import assert_within
from tests.kernels.conftest import make_ops
from tests.kernels.interpreter import quick_device_calls

DRAFTS = ((300, 5), (40, 3), (0, 2), (129, 8))
"""Several query tokens each, as verifying drafted tokens asks for them: 4 heads make 32 rows of the longest."""


@pytest.fixture(params=["triton", "triton-bf16"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_device_calls():
        yield


def attend(ops: Ops, inputs: AttentionInputs, mass: torch.Tensor | None = None) -> torch.Tensor:
    out = make_out(inputs.batch.num_tokens, inputs.q.shape[1], ops.activation_dtype)
    q = inputs.q.to(ops.activation_dtype)
    ops.attend(inputs.batch, q, inputs.rope, inputs.cache, inputs.spec, out, mass)
    return out[: inputs.batch.num_tokens]


# --------------------------------------------------------------------------- packed conversions


def run_ptx(text: str, word: int) -> list[int]:
    """The two registers that a fragment of PTX computes of one; only the opcodes that the kernels' fragments use."""
    registers = {"$2": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def permute(a: int, b: int, selectors: int) -> int:
        source = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(source[selectors >> 4 * i & 7] for i in range(4)), "little")

    operations: dict[str, Callable[..., int]] = {
        "xor.b32": lambda a, b: a ^ b,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": permute,
    }
    for line in text.replace("{", "").replace("}", "").split(";"):
        opcode, _, operands = line.strip().partition(" ")
        if opcode and opcode != ".reg":
            target, *sources = [name.strip() for name in operands.split(",")]
            registers[target] = operations[opcode](*map(value, sources))
    return [registers["$0"], registers["$1"]]


@triton.jit
def convert(codes, out, TYPE: tl.constexpr):
    lanes = tl.arange(0, 256)
    tl.store(out + lanes, attention_tiles.half_bits(tl.load(codes + lanes), TYPE))


@pytest.mark.parametrize("element", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_both_conversions_give_every_code_its_float16(element: str) -> None:
    """What runs on a card, and what stands for it in the interpreter, against the definition of the formats."""
    fragment = {
        "int8": attention_tiles.INT8_BITS, "fp8_e4m3": attention_tiles.E4M3_BITS, "fp8_e5m2": attention_tiles.E5M2_BITS,
    }[element].value  # fmt: skip
    codes = np.arange(256, dtype=np.uint8)
    packed = [run_ptx(fragment, int(word)) for word in codes.view(np.uint32)]
    on_card = np.array(packed, np.uint32).view(np.float16).ravel()

    out = torch.empty(256, dtype=torch.float16)
    source = torch.from_numpy(codes)
    convert[(1,)](source.view(torch.int8) if element == "int8" else source, out, element)
    assert np.array_equal(out.numpy().view(np.uint16), on_card.view(np.uint16))

    if element == "int8":
        expected = (codes.view(np.int8).astype(np.float64) + 128) * 2.0**-24
    else:
        dtype = torch.float8_e4m3fn if element == "fp8_e4m3" else torch.float8_e5m2
        expected = source.view(dtype).double().numpy() / (256 if element == "fp8_e4m3" else 1)
    numbers = np.isfinite(expected)
    assert numbers.sum() >= 248
    assert np.array_equal(on_card[numbers].astype(np.float64), expected[numbers])


# --------------------------------------------------------------------------- grids


@pytest.mark.parametrize("group_heads", [1, 4, 8])
def test_few_query_tokens_are_decoded(ops: Ops, group_heads: int) -> None:
    check_attention(ops, AttentionCase("drafts", DRAFTS, 2 * group_heads, 2, element="fp16", block_mass=True))


@pytest.mark.parametrize("head_dim", [16, 32, 48])
def test_small_heads(ops: Ops, head_dim: int) -> None:
    check_attention(ops, AttentionCase("small", ((40, 1), (20, 33)), head_dim=head_dim, rotated=True, key_bias=1.0))


@pytest.mark.parametrize(("rotated", "key_bias"), [(True, 0.0), (False, 1.0)])
def test_bfloat16_keys_that_are_rotated_or_have_a_bias(ops: Ops, rotated: bool, key_bias: float) -> None:
    check_attention(
        ops, AttentionCase("bf16", ((140, 1), (20, 33)), element="bf16", rotated=rotated, key_bias=key_bias)
    )


def test_sizes_that_are_stated_change_nothing_but_the_grid(ops: Ops) -> None:
    """As under a graph: the largest sizes that it may meet, and sequences that pad it, each with a token of its own."""
    inputs = make_attention(AttentionCase("stated", ((700, 1), (30, 1), (254, 1)), rotated=True))
    looked_up = attend(ops, inputs).clone()
    batch, live = inputs.batch, inputs.batch.num_tokens
    batch.max_query_tokens, batch.max_slots = 1, 4096
    batch.num_tokens, batch.num_seqs = live + 2, live + 2
    batch.query_starts[live : live + 3] = torch.arange(live, live + 3)
    batch.positions[live : live + 2] = 0
    batch.groups[inputs.spec.group.group_id].num_slots[live : live + 2] = 0
    inputs.q = torch.cat((inputs.q, torch.full((2, inputs.q.shape[1]), 3.0)))
    padded = attend(ops, inputs)
    assert bool((padded[live:] == 0).all())
    table = cases.tolerance(cases.ATTENTION_INT8, ops)
    assert_within(padded[:live], looked_up.double().numpy(), table)


@pytest.mark.parametrize("card", KNOWN_CARDS, ids=lambda card: card.name)
def test_splits_fill_the_card_and_are_not_too_short(card: attention_configs.Card) -> None:
    for num_seqs in (1, 3, 16, 512):
        for max_slots in (1, 100, 8192, 131072):
            splits = attention_configs.split_count(card, num_seqs, 8, max_slots)
            assert 1 <= splits <= MAX_SPLITS
            assert splits == 1 or (splits - 1) * MIN_SPLIT_SLOTS < max_slots
            assert splits == 1 or (splits - 1) * num_seqs * 8 < attention_configs.PROGRAMS_PER_SM * card.num_sms
    assert attention_configs.split_count(card, 1, 8, 131072) * 8 >= 2 * card.num_sms


def test_more_heads_than_a_tile_holds_are_refused_by_name(ops: Ops) -> None:
    with pytest.raises(NotImplementedError, match="33 query heads"):
        attend(ops, make_attention(AttentionCase("wide", ((3, 1),), 33, 1, element="fp16")))


def test_workspace_grows_by_doubling_and_keeps_what_it_outgrew() -> None:
    workspace = attention.Workspace(torch.device("cpu"))
    small = workspace.take("sums", 100, torch.float32)
    small.fill_(7)
    assert small.numel() == 128
    assert workspace.take("sums", 128, torch.float32) is small
    assert workspace.take("other", 100, torch.float32).data_ptr() != small.data_ptr()
    address = small.data_ptr()
    assert workspace.take("sums", 129, torch.float32).numel() == 256
    del small
    # A graph that was recorded with it still writes there.
    assert any(kept.data_ptr() == address and bool((kept == 7).all()) for kept in workspace._outgrown)


# --------------------------------------------------------------------------- numbers


def scale_values(inputs: AttentionInputs, factors: np.ndarray) -> None:
    """Multiply the int8 value scales of the slots of the only sequence, float [slots], by powers of two."""
    access = inputs.layer_bytes()
    _, _, scale_at = access.indices()
    slots = inputs.live_slots()[0]
    at = (slots[:, None] // 16, scale_at[slots % 16])
    access.v_scales()[at] = (access.v_scales()[at].astype(np.float64) * factors[:, None]).astype(np.float16)


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("new", [1, 20])
def test_value_scales_of_any_size_lose_nothing(ops: Ops, order: str, new: int) -> None:
    """Scales from 2^-14 to 2^10 of one another, in the order that a running maximum finds worst, and in others."""
    inputs = make_attention(AttentionCase("scales", ((400, new),)))
    exponents = np.linspace(-8, 16, inputs.num_slots[0]).round()
    if order == "falling":
        exponents = exponents[::-1]
    elif order == "mixed":
        exponents = np.random.default_rng(0).permutation(exponents)
    scale_values(inputs, np.exp2(exponents))
    q = inputs.q.to(ops.activation_dtype)
    expected, _ = expected_attention(inputs, q, "a16")
    largest = np.abs(expected).max()
    line = cases.tolerance(cases.ATTENTION_INT8, ops)
    # The table's lines are for values around 1.
    assert_within(attend(ops, inputs), expected, replace(line, absolute=line.absolute * largest))


def test_values_small_beside_one_outlier_keep_their_bits(ops: Ops) -> None:
    """A token of values 2^15 times the others', which no query looks at, must not cost the others theirs."""
    inputs = make_attention(AttentionCase("outlier", ((200, 1),)))
    scale_values(inputs, np.where(np.arange(201) == 5, 2.0**14, 0.5))
    access = inputs.layer_bytes()
    k_at, _, scale_at = access.indices()
    block, token = divmod(int(inputs.live_slots()[0][5]), 16)
    # Its key is the opposite of a query: its weight is nearly nothing.
    query = inputs.q.view(4, 64)
    for head in range(2):
        towards = query[2 * head] + query[2 * head + 1]
        codes = -torch.round(towards / towards.abs().max() * 127)
        access.k_elements()[block, k_at[token, head]] = codes.to(torch.int8).numpy()
        access.k_scales()[block, scale_at[token, head]] = 2.0
    expected, _ = expected_attention(inputs, inputs.q.to(ops.activation_dtype), "a16")
    assert np.abs(expected).max() < 2
    assert_within(attend(ops, inputs), expected, cases.tolerance(cases.ATTENTION_INT8, ops))


def test_output_saturates_in_float16() -> None:
    ops = make_ops("triton")
    inputs = make_attention(AttentionCase("saturates", ((40, 1),)))
    access = inputs.layer_bytes()
    _, v_at, scale_at = access.indices()
    slots = inputs.live_slots()[0]
    access.v_scales()[slots[:, None] // 16, scale_at[slots % 16]] = 60_000.0
    access.v_elements()[slots[:, None, None] // 16, v_at[slots % 16]] = -100
    assert bool((attend(ops, inputs) == -65504).all())


@pytest.mark.parametrize("place", ["query", "key scale", "value scale"])
@pytest.mark.parametrize("new", [1, 20])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
def test_nan_comes_through(ops: Ops, place: str, new: int) -> None:
    """What has overflowed must be seen in the end, and must not touch other sequences."""
    inputs = make_attention(AttentionCase("nan", ((70, new), (40, 1))))
    if place == "query":
        inputs.q[:new] = torch.nan
    else:
        access = inputs.layer_bytes()
        scales = access.k_scales() if place == "key scale" else access.v_scales()
        _, _, scale_at = access.indices()
        block, token = divmod(int(inputs.live_slots()[0][7]), 16)
        scales[block, scale_at[token]] = np.nan
    out = attend(ops, inputs)
    assert bool(out[:new].isnan().all())
    assert bool(out[new:].isfinite().all())
