"""Linear layers on the GPU: which kernels one call of `Ops.linear` launches.

Integer parts run on their codes (see `linear_codes`); parts that are held in 16 bits, and integer parts under very
many rows, whose weights are then written out in 16 bits once per call, go through torch.mm. Wherever sums of splits or
a product by torch come back in float32, one more kernel adds bias and residual and rounds. `prepare` runs on the
loading thread, the rest on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvd_kernels.triton import linear_configs as configs
from kvd_kernels.triton import linear_kernels as kernels
from kvd_kernels.triton import packing
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.linear_configs import LinearConfig, MatrixShape
from kvd_kernels.triton.linear_variants import variants
from kvd_kernels.triton.packing import PackedInteger, PackedLinear
from kvd_kernels.triton.tuning import Tuned
from kvd_kernels.weights import Linear

__all__ = ["LinearKernels", "PackedLinear", "variants"]


_ONCE = {"num_warps": 4, "num_stages": 1}
_FINISH_SPLITS = {"MAX_SPLITS": configs.MAX_SPLITS, "BN": configs.FINISH_OUTPUTS, **_ONCE}
_FINISH_ROWS = {"BM": configs.FINISH_ROWS, "BN": configs.FINISH_OUTPUTS, **_ONCE}


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the outputs of one part go: columns of out, and what is added to them."""

    n: int
    out: torch.Tensor  # [n, part outputs], a view
    bias: torch.Tensor | None
    residual: torch.Tensor | None  # a view like out


class LinearKernels:
    """See the module. dtype: of the activations."""

    def __init__(self, device: torch.device, card: Card, dtype: torch.dtype, tuned: Tuned | None = None) -> None:
        self._device = device
        self._card = card
        self._dtype = dtype
        self._tuned = tuned or Tuned()
        # Stand in for arguments that a launch does not look at.
        self._nothing = torch.zeros(16, dtype=torch.float32, device=device)
        self._no_residual = torch.zeros(1, 16, dtype=dtype, device=device)

    def use_tuning(self, tuned: Tuned) -> None:
        """Ask this one from now on."""
        self._tuned = tuned

    def prepare(self, linear: Linear) -> PackedLinear:
        """Pack a layer on the device."""
        return packing.pack(linear, self._device, self._dtype)

    def prepared_bytes(self, linear: Linear) -> int:
        """Bytes that `prepare` will hold for this layer."""
        return packing.packed_bytes(linear)

    def apply(
        self, n: int, x: torch.Tensor, layer: PackedLinear, out: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """out[:n] = x[:n] Wᵀ + bias (+ residual[:n]); the contract is that of `Ops.linear`.

        x has the dtype of the activations, out that or float32; rows of both are contiguous.
        """
        assert x.dtype == self._dtype
        assert out.dtype in (self._dtype, torch.float32)
        assert (x.shape[1], x.stride(1)) == (layer.num_inputs, 1)
        assert (out.shape[1], out.stride(1)) == (layer.num_outputs, 1)
        if n == 0:
            return
        start = 0
        for part in layer.parts:
            columns = slice(start, start + part.num_outputs)
            target = _Target(
                n,
                out[:n, columns],
                None if layer.bias is None else layer.bias[columns],
                None if residual is None else residual[:n, columns],
            )
            if isinstance(part, PackedInteger):
                self._apply_integers(x, part, target)
            else:
                self._finish(self._product(x[:n], part.values), 1, target)
            start = columns.stop

    def _apply_integers(self, x: torch.Tensor, part: PackedInteger, target: _Target) -> None:
        shape = MatrixShape(part.bits, part.group, part.padded_outputs, part.num_chunks)
        form, splits = configs.choose(self._card, shape, target.n, self._tuned)
        assert form in configs.forms(self._card, part.bits, part.group), "only forms of the table are launched"
        if form.kind == "dequantize":
            self._apply_dequantized(x, part, target, form)
            return
        # Float32 outputs without anything to add are the partial sums of the only split.
        is_plain = target.bias is None and target.residual is None
        is_direct = splits == 1 and target.out.dtype == torch.float32 and is_plain and target.out.is_contiguous()
        is_partial = splits > 1 or target.out.dtype == torch.float32
        if is_direct:
            partial = target.out
        elif is_partial:
            partial = self._empty(splits * target.n * part.num_outputs)
        else:
            partial = self._nothing
        self._launch(form, splits, x, part, target, partial if is_partial else None)
        if is_partial and not is_direct:
            self._finish(partial, splits, target)

    def _launch(
        self,
        form: LinearConfig,
        splits: int,
        x: torch.Tensor,
        part: PackedInteger,
        target: _Target,
        partial: torch.Tensor | None,
    ) -> None:
        """partial None: bias and residual are added in the kernel, and the result goes to target.out."""
        n = target.n
        out = x if partial is not None else target.out  # a pointer of the right type, which nobody looks at then
        residual = self._no_residual if target.residual is None else target.residual
        bias = self._nothing if target.bias is None else target.bias
        flags = (int(partial is not None), int(target.bias is not None), int(target.residual is not None))
        where = self._nothing if partial is None else partial
        sizes = (part.num_inputs, part.num_outputs, part.padded_outputs, part.num_chunks, -(-part.num_chunks // splits))
        tiles = -(-part.padded_outputs // form.block_outputs)
        options = {"num_warps": form.num_warps, "num_stages": form.num_stages}
        if form.kind == "vector":
            assert n == 1
            kernels.vector_kernel[(tiles, 1, splits)](
                x, part.words, part.scales, bias, residual, out, where, *sizes, *flags,
                BITS=part.bits, GROUP=part.group, BN=form.block_outputs, **options,
            )  # fmt: skip
            return
        row_tiles = -(-n // form.block_rows)
        sums, sums_stride = self._nothing, 0
        if form.is_wide:
            sums, sums_stride = self._group_sums(n, x, part, row_tiles * form.block_rows)
        kernels.tile_kernel[(tiles, row_tiles, splits)](
            x, part.words, part.scales, sums, bias, residual, out, where,
            n, *sizes, x.stride(0), residual.stride(0), out.stride(0), sums_stride, *flags,
            BITS=part.bits, GROUP=part.group, BN=form.block_outputs, BM=form.block_rows, SUMS_GIVEN=form.is_wide,
            **options, maxnreg=form.max_registers,
        )  # fmt: skip

    def _group_sums(self, n: int, x: torch.Tensor, part: PackedInteger, num_rows: int) -> tuple[torch.Tensor, int]:
        """Σ x per group and row, float32 [groups, num_rows] with zeros from n on, and the stride of its groups."""
        sums = self._empty(part.num_groups * num_rows)
        kernels.sums_kernel[(part.num_groups, num_rows // configs.SUM_ROWS)](
            x, sums, n, part.num_inputs, x.stride(0), num_rows,
            GROUP=part.group, BM=configs.SUM_ROWS, **_ONCE,
        )  # fmt: skip
        return sums, num_rows

    def _apply_dequantized(self, x: torch.Tensor, part: PackedInteger, target: _Target, form: LinearConfig) -> None:
        """Slice by slice of outputs: weights to 16 bits, product, bias and residual."""
        block = form.block_outputs
        most = max(configs.DEQUANTIZE_SLICE_BYTES // (2 * part.num_inputs * block), 1) * block
        length = min(most, part.padded_outputs)
        values = torch.empty(length, part.num_inputs, dtype=self._dtype, device=self._device)
        for start in range(0, part.num_outputs, length):
            columns = slice(start, min(start + length, part.num_outputs))
            blocks = -(-(columns.stop - start) // block)
            kernels.dequantize_kernel[(blocks, part.num_chunks)](
                part.words, part.scales, values, start, part.num_inputs, part.padded_outputs,
                part.group // packing.PLANE_CHANNELS, BITS=part.bits, BN=block,
                num_warps=form.num_warps, num_stages=form.num_stages,
            )  # fmt: skip
            piece = _Target(
                target.n,
                target.out[:, columns],
                None if target.bias is None else target.bias[columns],
                None if target.residual is None else target.residual[:, columns],
            )
            self._finish(self._product(x[: target.n], values[: columns.stop - start]), 1, piece)

    def _product(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """x · valuesᵀ in float32: [n, outputs]."""
        if self._device.type == "cuda":
            return torch.mm(x, values.t(), out_dtype=torch.float32)
        return x.float() @ values.float().t()

    def _finish(self, partial: torch.Tensor, splits: int, target: _Target) -> None:
        """Add up splits, bias and residual into target.out, with one rounding."""
        n, num_outputs = target.out.shape
        bias = self._nothing if target.bias is None else target.bias
        residual = self._no_residual if target.residual is None else target.residual
        flags = (int(target.bias is not None), int(target.residual is not None))
        strides = (residual.stride(0), target.out.stride(0))
        tiles = -(-num_outputs // configs.FINISH_OUTPUTS)
        if splits > 1:
            kernels.finish_splits_kernel[(tiles, n)](
                partial, bias, residual, target.out, n, num_outputs, splits, *strides, *flags, **_FINISH_SPLITS
            )  # fmt: skip
        else:
            kernels.finish_rows_kernel[(tiles, -(-n // configs.FINISH_ROWS))](
                partial, bias, residual, target.out, n, num_outputs, *strides, *flags, **_FINISH_ROWS
            )  # fmt: skip

    def _empty(self, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements, dtype=torch.float32, device=self._device)
