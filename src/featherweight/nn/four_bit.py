"""4-bit weights: NF4, FP4, or any codebook of sixteen values, in bitsandbytes' layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from featherweight.errors import ModelError, UnsupportedError
from featherweight.nn.frozen import frozen, quantise
from featherweight.nn.functional import linear_4bit
from featherweight.nn.quantised import QuantisedLinear, finite, known, wanted
from featherweight.quant import nested, quant_state
from featherweight.quant.blockwise import BLOCKSIZES
from featherweight.quant.codebooks import codebook
from featherweight.quant.quant_state import QuantState


class FourBitLinear(QuantisedLinear):
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
        self.original_dtype = torch.float32  # of the weight that was quantised
        self.quant_storage = torch.uint8  # dtype under which bitsandbytes files keep the codes
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
        new.register_parameter("bias", frozen(bias))
        new.quantise(weight)
        return new

    def quantise(self, weight: torch.Tensor) -> None:
        """Take the codes of a weight [N, K]; UnsupportedError for one with NaN or infinity."""
        self.original_dtype = weight.dtype
        if weight.is_meta:
            return
        code = codebook(self.quant_type).to(weight.device)
        flat = weight.detach().contiguous()
        op = torch.ops.featherweight.quantize_4bit
        codes, absmax = quantise(op, flat, code, self.blocksize)
        self.set_codes(codes.reshape(-1, 1))
        self.quant_map = code
        self.absmax = absmax
        if self.nested_absmax is not None:
            nest = nested.nest(absmax.cpu())
            self.absmax = nest.codes.to(weight.device, copy=True)  # a view of whole blocks
            self.nested_absmax = nest.absmax.to(weight.device)
            self.nested_quant_map = nest.code.to(weight.device)
            self.nested_offset = nest.offset

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

    def stored(self) -> dict[str, torch.Tensor]:
        """`weight`, `weight.absmax`, … as bitsandbytes writes them, see `quant.quant_state`."""
        codes: torch.Tensor = self.weight
        if self.quant_storage is not torch.uint8:
            codes = codes.data.view(-1).view(self.quant_storage).view(-1, 1)
        named = {"weight": codes}
        for name in quant_state.STATISTICS:
            tensor = self._buffers[name]
            if tensor is not None:
                named[f"weight.{name}"] = tensor
        state = self.quant_state()
        return named | {state.key: state.to_tensor()}

    def quant_state(self) -> QuantState:
        """What is no tensor."""
        return QuantState(
            self.quant_type,
            self.blocksize,
            self.original_dtype,
            (self.out_features, self.in_features),
            None if self.nested_absmax is None else self.nested_offset,
        )

    def take(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Take what `stored` gave, with whatever options it was quantised."""
        key = quant_state.find(stored)
        known(stored, ("weight", *(f"weight.{name}" for name in quant_state.STATISTICS), key))
        try:
            state = QuantState.from_tensor(stored[key])
        except ModelError as error:
            raise ModelError(f"'{key}': {error}") from None
        if state.key != key:
            raise ModelError(f"'{key}' says that it is {state.quant_type}")
        shape = (self.out_features, self.in_features)
        if state.shape != shape:
            raise ModelError(
                f"'{key}' describes {state.quant_type} {list(state.shape)}; the model has a layer"
                f" of {list(shape)} there"
            )
        blocks = -(-self.out_features * self.in_features // state.blocksize)
        double = state.nested_offset is not None
        absmax_dtype = torch.uint8 if double else torch.float32
        new = {
            "absmax": wanted(stored, "weight.absmax", absmax_dtype, (blocks,)),
            "quant_map": wanted(stored, "weight.quant_map", torch.float32, (16,)),
        }
        if double:
            outer = -(-blocks // nested.BLOCKSIZE)
            new["nested_absmax"] = wanted(stored, "weight.nested_absmax", torch.float32, (outer,))
            new["nested_quant_map"] = wanted(
                stored, "weight.nested_quant_map", torch.float32, (256,)
            )
        finite(**{f"weight.{name}": tensor for name, tensor in new.items()})
        self.set_codes(self._codes(stored["weight"]))
        self.quant_storage = stored["weight"].dtype
        self.quant_type = state.quant_type
        self.blocksize = state.blocksize
        self.original_dtype = state.dtype
        self.nested_offset = state.nested_offset or 0.0
        for name in quant_state.STATISTICS:
            self._buffers[name] = new.get(name)

    def _codes(self, weight: torch.Tensor) -> torch.Tensor:
        """uint8 [n / 2, 1] of a weight of any `quant_storage`: the same bytes."""
        size = -(-self.out_features * self.in_features // 2)
        if weight.nbytes != size:
            kind = str(weight.dtype).removeprefix("torch.")
            raise ModelError(
                f"'weight' is {kind} {list(weight.shape)}, {weight.nbytes} bytes; the codes of"
                f" [{self.out_features}, {self.in_features}] take {size}"
            )
        return weight.detach().contiguous().view(-1).view(torch.uint8).view(-1, 1)

    def extra_repr(self) -> str:
        """Sizes, codebook, blocks."""
        double = ", double=True" if self.nested_absmax is not None else ""
        exact = ", exact=True" if self.exact else ""
        return (
            f"{super().extra_repr()}, quant_type={self.quant_type}, blocksize={self.blocksize}"
            f"{double}{exact}"
        )
