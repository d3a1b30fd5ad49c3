"""4-bit weights: NF4, FP4, or any codebook of sixteen values, in bitsandbytes' layout."""

from __future__ import annotations

from typing import Any, Self

import torch

from featherweight.errors import UnsupportedError
from featherweight.nn.frozen import FrozenLinear, quantise
from featherweight.nn.functional import linear_4bit
from featherweight.quant import nested
from featherweight.quant.blockwise import BLOCKSIZES
from featherweight.quant.codebooks import codebook


class FourBitLinear(FrozenLinear):
    """A linear layer of 4-bit weights [N, K] in blocks that share one absmax (arXiv 2305.14314).

    `weight` holds the codes, uint8 [ceil(N · K / 2), 1], the first weight in the high nibble; its
    blocks run across row ends. `absmax` is f32 [blocks], or uint8 [blocks] with `double`, when
    `nested_absmax` f32 [ceil(blocks / 256)], `nested_quant_map` f32 [256] and `nested_offset` say
    what it stands for. `quant_map` f32 [16] is the codebook.

    Args:
        quant_type: "nf4", "fp4" or "int4", see `featherweight.quant.codebooks`.
        blocksize: weights that share one absmax.
        double: absmax values are quantised too.
        exact: multiply float activations, instead of rounding them to 8 bits block by block.
    """

    absmax: torch.Tensor
    quant_map: torch.Tensor
    nested_absmax: torch.Tensor | None
    nested_quant_map: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        quant_type: str = "nf4",
        blocksize: int = 64,
        double: bool = False,
        exact: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if blocksize not in BLOCKSIZES:
            raise UnsupportedError(
                f"blocksize={blocksize}", hint=f"choose one of {', '.join(map(str, BLOCKSIZES))}"
            )
        self.quant_type = quant_type
        self.blocksize = blocksize
        self.exact = exact
        self.nested_offset = 0.0  # a number, not a buffer: reading that would cost more than a call
        count = in_features * out_features
        blocks = -(-count // blocksize)
        codes = torch.zeros(-(-count // 2), 1, dtype=torch.uint8, device=device)
        self.set_tensors(codes, torch.zeros(out_features, device=device) if bias else None)
        absmax_dtype = torch.uint8 if double else torch.float32
        nested_blocks = -(-blocks // nested.BLOCKSIZE)
        self.register_buffer("absmax", torch.zeros(blocks, dtype=absmax_dtype, device=device))
        self.register_buffer("quant_map", codebook(quant_type).to(device))
        self.register_buffer(
            "nested_absmax", torch.zeros(nested_blocks, device=device) if double else None
        )
        self.register_buffer(
            "nested_quant_map", nested.DYNAMIC.clone().to(device) if double else None
        )

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        quant_type: str = "nf4",
        blocksize: int = 64,
        double: bool = False,
        exact: bool = False,
    ) -> Self:
        """Quantise a weight [N, K].

        Raises UnsupportedError for a weight with NaN or infinity, and for a quant_type or
        blocksize that there is not.
        """
        out_features, in_features = weight.shape
        new = cls(
            in_features, out_features, False, quant_type, blocksize, double, exact, device="meta"
        )
        code = codebook(quant_type).to(weight.device)
        flat = weight.detach().contiguous()
        codes, absmax = quantise(torch.ops.featherweight.quantize_4bit, flat, code, blocksize)
        new.set_tensors(codes.reshape(-1, 1), bias)
        new.quant_map = code
        new.absmax = absmax
        if double:
            nest = nested.nest(absmax.cpu())
            new.absmax = nest.codes.to(weight.device, copy=True)  # a view of whole blocks
            new.nested_absmax = nest.absmax.to(weight.device)
            new.nested_quant_map = nest.code.to(weight.device)
            new.nested_offset = nest.offset
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] → [..., N] in the dtype of x."""
        parameters, buffers = self._parameters, self._buffers  # past nn.Module.__getattr__
        return linear_4bit(
            x,
            parameters["weight"],  # type: ignore[arg-type]
            buffers["absmax"],  # type: ignore[arg-type]
            buffers["nested_absmax"],
            buffers["nested_quant_map"],
            self.nested_offset,
            buffers["quant_map"],  # type: ignore[arg-type]
            self.blocksize,
            self.out_features,
            parameters["bias"],
            self.exact,
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that the codes stand for, [N, K]."""
        return torch.ops.featherweight.dequantize_4bit(
            self.weight.data,
            self.absmax,
            self.nested_absmax,
            self.nested_quant_map,
            self.nested_offset,
            self.quant_map,
            self.blocksize,
            [self.out_features, self.in_features],
            dtype,
        )

    def get_extra_state(self) -> torch.Tensor:
        """`nested_offset` for the state dict: a tensor [], as safetensors wants it."""
        return torch.tensor(self.nested_offset)

    def set_extra_state(self, state: Any) -> None:
        """`nested_offset` from a state dict."""
        self.nested_offset = float(state)

    def extra_repr(self) -> str:
        """Sizes, codebook, blocks."""
        double = ", double=True" if self.nested_absmax is not None else ""
        exact = ", exact=True" if self.exact else ""
        return (
            f"{super().extra_repr()}, quant_type={self.quant_type}, blocksize={self.blocksize}"
            f"{double}{exact}"
        )
