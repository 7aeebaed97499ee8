"""Launch configurations of linear layers: plain functions of the card and of shapes. Torch-free; stateless.

Which forms of the kernels there are for a number of rows stands in a table. In how many splits of the input channels
one is launched follows from `estimate`, a model of the card; where there are several forms, a measurement on the user's
own card (`tuning`) can take another than the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.tuning import Tuned

LINE_BYTES = 64
MAX_SPLITS = 16
MIN_SPLIT_CHUNKS = 4
"""A split is at least as long as the software pipeline is deep."""
MAX_NARROW_ROWS = 32
DEQUANTIZE_ROWS = 1024
"""From here on the weights are written out in 16 bits once and multiplied by torch, by the tables' own choice."""
DEQUANTIZE_SLICE_BYTES = 64 << 20
"""Most weights that are written out in 16 bits at a time: what scratch memory this takes, whatever the layer."""
FINISH_OUTPUTS = 128
FINISH_ROWS = 16
SUM_ROWS = 64

LATENCY_SECONDS = 1e-6
LAUNCH_SECONDS = 2e-6
CACHED_COST = 1 / 3
SPLIT_GAIN = 0.95
"""Assumptions of `estimate`: from a load to its data with all SMs loading; a second kernel; what a byte from the
second-level cache costs, as a share of one from memory; what more splits may take of the time of fewer.
"""

Kind = Literal["tile", "vector", "dequantize"]


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """block_outputs, block_rows: of a thread block's tile, in which weights are the left operand."""

    kind: Kind
    block_outputs: int
    block_rows: int
    num_warps: int
    num_stages: int

    @property
    def max_registers(self) -> int | None:
        """Per thread; None leaves it to the assembler. It spills some small tiles to fit one block more onto an SM."""
        return 168 if self.kind == "tile" and self.block_rows <= 8 else None

    @property
    def is_wide(self) -> bool:
        """Whether Σ x of the groups comes from a kernel before: products with ones would cost many rows too much."""
        return self.kind == "tile" and self.block_rows > MAX_NARROW_ROWS


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A packed integer matrix: bits, group as packed, padded outputs, lines of 64 bytes per output."""

    bits: int
    group: int
    padded_outputs: int
    num_chunks: int

    @property
    def num_bytes(self) -> int:
        """Of codes and scales, roughly."""
        return self.padded_outputs * self.num_chunks * (LINE_BYTES + 4)


VECTOR = LinearConfig("vector", 128, 1, 4, 1)
DEQUANTIZE = LinearConfig("dequantize", 32, 0, 4, 1)

# Two warps with many outputs each rather than four with few: a dequantised operand serves few columns, so registers go
# to outputs. It also keeps sm_90 on products of one warp, whose operands come straight from registers; those of warp
# groups cost a third more instructions here. On A100, H100 and H200, whose second-level cache is hardly faster than
# their memory, 16 rows go with 128 outputs, which halves what is read of x.
_TILE_8 = LinearConfig("tile", 64, 8, 2, 4)
_TILE_16 = LinearConfig("tile", 64, 16, 2, 4)
_TILE_16_BROAD = LinearConfig("tile", 128, 16, 2, 4)
_TILE_32 = LinearConfig("tile", 128, 32, 4, 4)
_WIDE = LinearConfig("tile", 128, 64, 8, 3)
_WIDE_90 = LinearConfig("tile", 128, 128, 8, 3)
"""Only products of warp groups leave registers enough for this one, and only where a chunk has one group."""


def _narrow(card: Card, group: int, bucket: int) -> LinearConfig:
    if bucket <= 8:
        return _TILE_8
    if bucket <= 16:
        # On sm_80 groups of 32 leave too few registers for it.
        is_broad = card.architecture == 90 or (card.architecture == 80 and group > 32)
        return _TILE_16_BROAD if is_broad else _TILE_16
    return _TILE_32


def _wide(card: Card, bits: int, group: int, bucket: int) -> tuple[LinearConfig, ...]:
    has_large = card.architecture == 90 and bucket > 64 and bits * group == 8 * LINE_BYTES
    return (_WIDE_90, _WIDE) if has_large else (_WIDE,)


def forms(card: Card, bits: int, group: int) -> tuple[LinearConfig, ...]:
    """Every form that can be launched on a card for weights of so many bits and groups as packed."""
    narrow = tuple(_narrow(card, group, bucket) for bucket in (8, 16, 32))
    wide = _wide(card, bits, group, 128)
    return (*narrow, *wide, DEQUANTIZE, *((VECTOR,) if bits == 4 else ()))


def row_bucket(n: int) -> int:
    """All numbers of rows of a bucket share forms, splits and tuned choices: 1, 8, 16, 32, 64, 128, 1023, 1024."""
    for bound in (1, 8, 16, 32, 64, 128, DEQUANTIZE_ROWS - 1):
        if n <= bound:
            return bound
    return DEQUANTIZE_ROWS


def candidates(card: Card, shape: MatrixShape, bucket: int) -> tuple[LinearConfig, ...]:
    """The forms for a bucket of rows, the table's own choice first.

    One row: the tile of 8 leads although 7 of its columns are empty, for it takes a third of the vector kernel's
    instructions per weight (both read from the machine code, see `linear_variants`).
    """
    if bucket <= MAX_NARROW_ROWS:
        narrow = _narrow(card, shape.group, bucket)
        return (narrow, VECTOR) if bucket == 1 and shape.bits == 4 else (narrow,)
    wide = _wide(card, shape.bits, shape.group, bucket)
    if bucket <= 128:
        return wide
    return (DEQUANTIZE, *wide) if bucket >= DEQUANTIZE_ROWS else (*wide, DEQUANTIZE)


def estimate(card: Card, shape: MatrixShape, form: LinearConfig, bucket: int) -> tuple[float, int]:
    """(seconds, splits) of a narrow or vector form at the number of splits that takes least.

    A form cuts the matrix into t = padded outputs / block outputs tiles, and s splits make t · s blocks of ⌈chunks / s⌉
    chunks. The busiest SM gets b = ⌈t · s / SMs⌉ of them and has 1 / SMs of the bandwidth:

        work   = b · ⌈chunks / s⌉ · (bytes of weights + CACHED_COST · bytes of x per chunk) / (bandwidth / SMs)
        flight = bytes that b blocks keep on their way: b · stages · bytes of weights per chunk
        time   = work · max(1, bandwidth / SMs · LATENCY / flight) + LATENCY
                 + (s > 1: LAUNCH + 8 s · rows · outputs / bandwidth)

    so too few blocks cost latency, uneven ones cost the wait for the last, and splits cost the second kernel. More
    splits have to gain a twentieth, since blocks are not as even as this.
    """
    per_sm = card.bytes_per_second / card.num_sms
    tiles = -(-shape.padded_outputs // form.block_outputs)
    weight_bytes = form.block_outputs * (LINE_BYTES + 4)
    x_bytes = bucket * (512 // shape.bits) * 2
    best = (float("inf"), 1)
    for splits in range(1, min(MAX_SPLITS, max(1, shape.num_chunks // MIN_SPLIT_CHUNKS)) + 1):
        length = -(-shape.num_chunks // splits)
        if -(-shape.num_chunks // length) != splits:
            continue  # the last split would be empty
        blocks = -(-tiles * splits // card.num_sms)
        work = blocks * length * (weight_bytes + CACHED_COST * x_bytes) / per_sm
        flight = blocks * form.num_stages * weight_bytes
        seconds = work * max(1.0, per_sm * LATENCY_SECONDS / flight) + LATENCY_SECONDS
        if splits > 1:
            moved = 8 * splits * bucket * shape.padded_outputs
            seconds += LAUNCH_SECONDS + moved / card.bytes_per_second
        if seconds < SPLIT_GAIN * best[0]:
            best = (seconds, splits)
    return best


def wide_splits(card: Card, shape: MatrixShape, form: LinearConfig, n: int) -> int:
    """Splits of a wide form: as many as there are SMs for each tile, none shorter than 8 chunks."""
    tiles = -(-shape.padded_outputs // form.block_outputs) * -(-n // form.block_rows)
    wanted = max(1, min(card.num_sms // tiles, MAX_SPLITS, shape.num_chunks // 8))
    length = -(-shape.num_chunks // wanted)
    return -(-shape.num_chunks // length)


def choose(card: Card, shape: MatrixShape, n: int, tuned: Tuned) -> tuple[LinearConfig, int]:
    """The form for n > 0 rows, and its splits. A measurement on the user's card goes before the model."""
    bucket = row_bucket(n)
    size = "small" if shape.num_bytes < 16 << 20 else "large"
    key = f"linear int{shape.bits} group {shape.group}, {size}, {bucket} rows"
    form = tuned.choose(key, candidates(card, shape, bucket))
    if form.kind == "dequantize":
        return form, 1
    if form.is_wide:
        return form, wide_splits(card, shape, form, bucket)
    return form, estimate(card, shape, form, bucket)[1]
