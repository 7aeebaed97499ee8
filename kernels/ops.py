"""The contract of the numeric ops. Each op is stated once, here; implementations live beside this file.

Conventions
- Buffers are allocated once for the largest step. `n` is the number of live rows; an op reads and writes rows
  0 … n-1 of its buffers and leaves the others untouched. Nothing is returned, except where it says so.
- Activations have the dtype `Ops.activation_dtype` (float32 for a8 on the CPU). T is the number of live tokens of
  a step, S of live sequences, R of rows that need logits, H query heads, KVH key/value heads, D head_dim.
- Ops never allocate per call what outlives the call and never look at live sizes other than through `Batch`.
- Exactness (a8): row i of every output depends, bit for bit, on row i of the inputs and on the cache alone: not on
  n, on the other rows, on how a prompt was cut into chunks, or on the number of threads.

Arithmetic a8 (CPU). Activations of a linear are rounded to int8 per row and group of min(group, 128) input
channels: s = absmax / 127 in float32 (1 where that is 0), q = round-half-even(x / s), within ±127. Inside a group
integers are summed exactly; then, groups in ascending order, every operation rounded to float32 on its own (no fma):

    y ← 0;  y ← y + s_x · (Σ q_w q_x · s_w + Σ q_x · o_w)        (int4; int8 weights have no o_w term)
    y ← y + bias;  y ← y + residual                              (each where given)

A weight group larger than 128 (or a whole row) is cut into activation groups of 128 at most that share s_w and
o_w. Attention rounds the query to int8 per head, sums q·k exactly, and works in splits of 256 positions; see
`reference/splits.py`. Arithmetic a16 (GPU): 16-bit activations, float32 accumulation, no promise on order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from kvd_kernels.kv_format import GroupFormat, KVFormat
from kvd_kernels.sampling_types import Ragged as Ragged
from kvd_kernels.sampling_types import SamplingBatch as SamplingBatch
from kvd_kernels.sampling_types import SamplingResult as SamplingResult
from kvd_kernels.under_way import DeviceMemory as DeviceMemory
from kvd_kernels.under_way import FinishedStep as FinishedStep
from kvd_kernels.under_way import FinishedTransfer as FinishedTransfer
from kvd_kernels.under_way import PendingStep as PendingStep
from kvd_kernels.under_way import Transfer as Transfer
from kvd_kernels.weights import Linear, WeightMatrix


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of position · inverse frequency: float32 [max_positions, rotary_dim / 2] each.

    The pairs are (i, i + rotary_dim / 2), as in Hugging Face's "rotate half"; channels from rotary_dim on pass.
    Attention scaling of a rope type, where it has one, is already multiplied in.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(slots=True)
class GroupTables:
    """Block tables of one layer group for the live sequences of a step.

    block_tables     int32 [max_seqs, max_blocks]; entries beyond a sequence's own are undefined
    first_positions  int32 [max_seqs, max_blocks]; absolute position of slot 0 of that entry: a multiple of 16, greater
                     than that of the entry before; entries may be missing in front (a window) and between (a hole)
    num_slots        int32 [max_seqs]; token slots in use over the table, this step's tokens included: slot t is
                     token t % 16 of table entry t // 16
    write_slots      int64 [max_tokens]; for each token of the step: block id · 16 + token in block
    """

    block_tables: torch.Tensor
    first_positions: torch.Tensor
    num_slots: torch.Tensor
    write_slots: torch.Tensor


class LiveSize(IntEnum):
    """Stands for a live size while a forward pass is recorded, where the size itself is not known yet.

    `Batch.num_tokens` and `Batch.num_logit_rows` hold these then, and so does the `n` of every op call; a backend that
    records resolves them from the live Batch at each replay.
    """

    TOKENS = -1
    LOGIT_ROWS = -2


@dataclass(slots=True)
class Batch:
    """One step's metadata, in preallocated buffers of which only the first live entries mean anything.

    token_ids     int64 [max_tokens]; -1 - slot stands for the newest token that was sampled for that slot, which the
                  caller does not know yet; only where `Ops.steps_ahead` is not 0
    positions     int32 [max_tokens], absolute
    query_starts  int32 [max_seqs + 1]; tokens of sequence s are query_starts[s] … query_starts[s + 1] - 1
    logit_rows    int64 [max_seqs]; token indices whose logits are wanted, in sequence order
    groups        one GroupTables per layer group
    logit_slots   int64 [max_seqs] or None; the slot under which the token of each logits row is kept
    max_query_tokens, max_slots
                  the most tokens of a live sequence, and the most token slots over a table; 0 where nobody has said
                  them, so that who needs them has to look
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    logit_rows: torch.Tensor
    groups: tuple[GroupTables, ...]
    num_tokens: int = 0
    num_seqs: int = 0
    num_logit_rows: int = 0
    logit_slots: torch.Tensor | None = None
    max_query_tokens: int = 0
    max_slots: int = 0


@dataclass(slots=True)
class KVCache:
    """The tensors of the cache: per layer group uint8 [num_blocks, block_bytes], laid out as `format` says."""

    format: KVFormat
    pools: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention of one layer needs beside tensors.

    key_bias  float32 [KVH, D] or None: the projection bias of K before RoPE, when the layer's K is bias-free
    """

    layer_index: int
    group: GroupFormat
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    key_bias: torch.Tensor | None = None


class StepProgram(ABC):
    """The forward pass and the sampling of one step, ready to be run any number of times. Made by `Ops.record`.

    logits  float32 [max_seqs, vocab]: row r belongs to logit row r of the latest run; rows from num_logit_rows on are
            undefined, and so is the whole before the first run
    """

    logits: torch.Tensor

    @abstractmethod
    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        """Compute all live tokens, write their K and V, fill the logits rows, and choose the tokens.

        batch: the object that was recorded, with new content. params None: no tokens are chosen and None is
        returned; else its num_rows is the batch's num_logit_rows.
        """

    def launch(self, batch: Batch, params: SamplingBatch | None) -> PendingStep:
        """Begin what `run` does. When this returns, batch and params may be filled anew.

        Steps, copies and transfers take effect in the order in which they were asked for. `logits` is this step's until
        the next launch.
        """
        return FinishedStep(self.run(batch, params))

    def prepare(self, report: Callable[[int, int], None]) -> None:
        """Do now what the first steps would take long for: compile, record. The cache keeps its bytes.

        report: called with (parts that are done, parts that there are), before each of them and at the end.
        """
        report(1, 1)


class Ops(ABC):
    """One backend. Handles that `prepare_*` return are opaque and belong to that backend."""

    name: str
    arithmetic: str  # "a8" or "a16"; part of every cache key together with the ISA-independent revision
    arithmetic_id: str
    device: torch.device
    activation_dtype: torch.dtype
    notices: tuple[str, ...] = ()  # what a user should know about how this backend started
    steps_ahead: int = 0  # how many steps more may be launched before the result of one is taken
    memory: DeviceMemory | None = None  # None: the host's
    device_id: str = ""  # by which a driver's tools know the device: the UUID of a GPU
    default_step_tokens: int = 256  # the most tokens of a step where nobody has said

    @property
    def label(self) -> str:
        """Name and variant, for people."""
        return self.name

    @abstractmethod
    def prepare_linear(self, linear: Linear) -> Any:
        """Pack a linear layer for this backend. The source tensors may be freed afterwards."""

    @abstractmethod
    def prepare_embedding(self, weight: WeightMatrix) -> Any:
        """Pack an embedding table [vocab_size, hidden]."""

    @abstractmethod
    def prepared_bytes(self, linear: Linear) -> int:
        """Bytes that `prepare_linear` will hold for this layer, for the memory budget."""

    @abstractmethod
    def embed(self, batch: Batch, table: Any, out: torch.Tensor) -> None:
        """out[t] = table[token_ids[t]] for live tokens; out [max_tokens, hidden]."""

    @abstractmethod
    def rms_norm(self, n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """out = x / sqrt(mean(x²) + eps) · weight, row by row; out may be x.

        x, out [rows, width]; weight float32 [width].
        """

    @abstractmethod
    def linear(
        self, n: int, x: torch.Tensor, handle: Any, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        """out = x Wᵀ + bias (+ residual); x [rows, K]; out, residual [rows, N]; residual may be `out`."""

    @abstractmethod
    def silu_mul(self, n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate) · up; gate_up [rows, 2 F] holds gate, then up; out [rows, F]."""

    @abstractmethod
    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        """Rotate q and k by position, write k and v of every live token into its cache slot.

        qkv [max_tokens, (H + 2 KVH) · D]: q, k, v side by side, biases added, except k's when the layer is
        bias-free. q_out [max_tokens, H · D]: q after RoPE, not yet Hadamard-rotated (attention does that, since the
        key-bias term needs the plain q). Cache bytes of other slots stay as they are.
        """

    @abstractmethod
    def attend(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None = None,
    ) -> None:
        """Causal paged attention over what the cache holds, the step's own tokens included.

        A query at position p sees the slots of its sequence with key position ≤ p and, in a windowed group,
        > p - window. Slots past num_slots, and holes between table entries, do not exist. out [max_tokens, H · D];
        a query that sees nothing yields 0. block_mass float32 [max_seqs, max_blocks], when given: softmax weight
        summed over query tokens and heads per table entry of each live sequence, overwritten.
        """

    @abstractmethod
    def gather(self, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[r] = x[logit_rows[r]] for live logit rows."""

    @abstractmethod
    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
        """Choose one token per live row of `params` from float32 logits [≥ num_rows, vocab], which stay unchanged.

        Order: bias, penalties, ban, then greedy (lowest id among equals) where temperature is 0; else
        temperature, top_k, top_p, min_p over the rest, and inverse transform sampling of one uniform number from
        Philox-4x32-10 keyed by the seed with the position as counter, candidates by falling probability, then id.
        A row that is not finite yields None, whatever the others hold.
        """

    @abstractmethod
    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        """Copy the first num_tokens tokens of a block, all layers of the group; other bytes of target stay."""

    def copy_rows(
        self, source: torch.Tensor, source_rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]
    ) -> Transfer:
        """target[target_rows[i]] = source[source_rows[i]], one after the other.

        source, target: uint8 [any, width], contiguous, of equal width and not the same memory; one of them may lie on
        the device and the other in memory from `allocate_host`, of which nobody may touch these rows until the
        transfer is over. Later steps and copies find the rows as this leaves them.
        """
        started = time.monotonic()
        assert source.shape[1] == target.shape[1]
        for source_row, target_row in zip(source_rows, target_rows, strict=True):
            assert source_row >= 0 <= target_row
            target[target_row].copy_(source[source_row])
        return FinishedTransfer(time.monotonic() - started)

    def settle(self) -> None:  # noqa: B027 - nothing is under way where ops return when they are done
        """Wait until all that was launched is over, whatever became of it; nobody touches host memory any more then.

        Raises what the device raises where it can compute nothing any more.
        """

    def allocate_host(self, num_rows: int, width: int) -> torch.Tensor:
        """Host memory that `copy_rows` moves to and from at full speed: uint8 [num_rows, width], contents undefined."""
        return torch.empty((num_rows, width), dtype=torch.uint8)

    def record(self, batch: Batch, cache: KVCache, forward: Callable[[Batch], torch.Tensor]) -> StepProgram:
        """Make a program of a forward pass over this batch's buffers and this cache.

        forward: calls the ops of one step in a fixed order, which depends on no live size, and returns the logits
        buffer. As it stands here, forward is called at every step and the tokens are sampled behind it; a backend that
        records calls it once, here, with a Batch of the same buffers whose sizes are `LiveSize` codes.
        """
        return _EagerProgram(self, batch, forward)


class _EagerProgram(StepProgram):
    """Calls the ops one by one, each step anew."""

    def __init__(self, ops: Ops, batch: Batch, forward: Callable[[Batch], torch.Tensor]) -> None:
        self.logits = torch.empty(0, dtype=torch.float32)
        self._ops = ops
        self._batch = batch
        self._forward = forward

    @torch.inference_mode()
    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        assert batch is self._batch, "a program runs on the batch that it was made for"
        self.logits = self._forward(batch)
        if params is None:
            return None
        assert params.num_rows == batch.num_logit_rows, "every logits row is sampled, or none"
        return self._ops.sample(self.logits, params)
