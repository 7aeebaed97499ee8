"""Kernels that write into blocks of the KV cache; `kv_format` says what lies where.

A pool is bytes; whatever another type has is stored through a pointer that was cast. Offsets from the start of a pool
are int64, those inside a block fit 32 bits.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvd_kernels.triton.formats import absmax, encode_fp8, hadamard, int8_scale, quantize_int8, round_to

# How the host names the element types of `kv_format`.
INT8 = tl.constexpr(0)
FP16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
FP8_E4M3 = tl.constexpr(3)
FP8_E5M2 = tl.constexpr(4)


@triton.jit
def _store(x, element, region, index, scales, live, inside):
    """Store heads, float32 [TOKENS, BLOCK], as elements of a type that is known at run time.

    region [TOKENS, 1] and scales [TOKENS]: pointers to bytes; index: of every channel's element in its region.
    """
    if element == INT8:
        scale = int8_scale(absmax(x, 1))
        tl.store(region.to(tl.pointer_type(tl.int8)) + index, quantize_int8(x, scale[:, None]), mask=inside)
        tl.store(scales.to(tl.pointer_type(tl.float16)), scale, mask=live)
    elif element == FP16:
        tl.store(region.to(tl.pointer_type(tl.float16)) + index, round_to(x, tl.float16), mask=inside)
    elif element == BF16:
        tl.store(region.to(tl.pointer_type(tl.bfloat16)) + index, round_to(x, tl.bfloat16), mask=inside)
    elif element == FP8_E4M3:
        tl.store(region + index, encode_fp8(x, True), mask=inside)
    else:
        tl.store(region + index, encode_fp8(x, False), mask=inside)


@triton.jit(
    do_not_specialize=["num_tokens", "num_heads", "num_kv_heads", "half", "k_element", "v_element", "is_rotated"]
)
def rope_and_write(
    qkv,
    q_out,
    cos,
    sin,
    positions,
    write_slots,
    pool,
    num_tokens,
    block_bytes,
    k_offset,
    v_offset,
    k_scale_offset,
    v_scale_offset,
    num_heads,
    num_kv_heads,
    half,
    k_element,
    v_element,
    is_rotated,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head of TOKENS tokens: q to q_out after RoPE; k after RoPE (and Hadamard), and v, into their cache slots.

    Grid (tokens / TOKENS, heads of q, k and v). A slot below 0 belongs to no token: the cache is left alone. All
    rounding is that of `reference`, bit for bit, when multiplications and additions are not fused.

    half: rotary_dim / 2; the offsets are those of the layer's regions inside a block; is_rotated 0 or 1; BLOCK: the
    power of two from HEAD_DIM on; ROTATION: side of the Hadamard blocks, ROTATION_SCALE its root's inverse.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    channel = tl.arange(0, BLOCK)[None, :]
    is_live = token < num_tokens
    inside = is_live[:, None] & (channel < HEAD_DIM)
    source = qkv + (token.to(tl.int64) * (num_heads + 2 * num_kv_heads) + head)[:, None] * HEAD_DIM
    x = tl.load(source + channel, mask=inside, other=0.0).to(tl.float32)

    if head < num_heads + num_kv_heads:
        is_first = channel < half
        turns = is_live[:, None] & (channel < 2 * half)
        position = tl.load(positions + token, mask=is_live, other=0).to(tl.int64)
        angle = position[:, None] * half + tl.where(is_first, channel, channel - half)
        partner = tl.load(source + tl.where(is_first, channel + half, channel - half), mask=turns, other=0.0)
        along = x * tl.load(cos + angle, mask=turns, other=0.0)
        across = partner.to(tl.float32) * tl.load(sin + angle, mask=turns, other=0.0)
        x = tl.where(turns, tl.where(is_first, along - across, along + across), x)

    if head < num_heads:
        target = q_out + (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM
        tl.store(target + channel, round_to(x, q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(write_slots + token, mask=is_live, other=-1)
        is_live &= slot >= 0
        inside &= is_live[:, None]
        block = pool + (slot // 16) * block_bytes
        place = (slot % 16).to(tl.int32)
        if head < num_heads + num_kv_heads:
            if is_rotated != 0:
                x = hadamard(x, ROTATION, ROTATION_SCALE, TOKENS, BLOCK)
            kv_head = head - num_heads
            index = ((kv_head * (HEAD_DIM // 4) + channel // 4) * 16 + place[:, None]) * 4 + channel % 4
            scales = block + k_scale_offset + (kv_head * 16 + place) * 2
            _store(x, k_element, (block + k_offset)[:, None], index, scales, is_live, inside)
        else:
            kv_head = head - num_heads - num_kv_heads
            index = ((kv_head * 4 + place // 4)[:, None] * HEAD_DIM + channel) * 4 + (place % 4)[:, None]
            scales = block + v_scale_offset + (kv_head * 16 + place) * 2
            _store(x, v_element, (block + v_offset)[:, None], index, scales, is_live, inside)


@triton.jit(do_not_specialize=["source", "target", "num_tokens"])
def copy_tokens(pool, regions, block_bytes, source, target, num_tokens, BLOCK: tl.constexpr):
    """Bytes of the first num_tokens tokens of block `source` to the same places of block `target`.

    Grid (regions, parts of the largest region). regions: int32 [num_regions, 5]: offset in a block, bytes, and what
    tells the token of byte b: (b // unit) % modulus + (b // outer) % 4 · 4; columns unit, modulus, outer.
    """
    region = regions + tl.program_id(0) * 5
    num_bytes = tl.load(region + 1)
    start = tl.program_id(1) * BLOCK
    if start < num_bytes:
        byte = start + tl.arange(0, BLOCK)
        token = (byte // tl.load(region + 2)) % tl.load(region + 3) + (byte // tl.load(region + 4)) % 4 * 4
        inside = (byte < num_bytes) & (token < num_tokens)
        place = pool + tl.load(region) + byte
        wide = block_bytes.to(tl.int64)
        taken = tl.load(place + source * wide, mask=inside)
        tl.store(place + target * wide, taken, mask=inside)
