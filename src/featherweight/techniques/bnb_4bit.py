"""What `bnb-nf4` and `bnb-fp4` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.integrations.bitsandbytes import enabled
from featherweight.machine import Machine
from featherweight.quant.blockwise import BLOCKSIZES
from featherweight.techniques.base import option
from featherweight.techniques.bnb import Bnb, bias_of
from featherweight.techniques.cast import DTYPES

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Bnb4bit(Bnb):
    """4-bit codes with one absmax a block, computed in a float dtype."""

    tolerance: ClassVar[float] = 0.9
    quant_type: ClassVar[str]

    double: bool = option(False, help="quantise the absmax values too")
    compute: str = option("fp32", choices=tuple(DTYPES), help="dtype of the arithmetic")
    blocksize: int = option(64, choices=BLOCKSIZES, help="weights that share one absmax")

    def config(self, skip_modules: list[str]) -> Any:
        """As `BitsAndBytesConfig(load_in_4bit=True, …)`; the blocksize is kept per tensor."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=DTYPES[self.compute],
            llm_int8_skip_modules=skip_modules,
        )

    def refuse(self, name: str, weight: torch.Tensor) -> None:
        """Weights that are not there, and shapes that bitsandbytes cannot do.

        Its packed CPU kernel asserts on those that it cannot tile. Its AVX-512 dequantiser, used
        where that kernel is not, misplaces absmax in rows that the blocksize does not divide.
        """
        from bitsandbytes.functional import has_avx512bf16

        super().refuse(name, weight)
        if weight.device.type != "cpu" or enabled():
            return
        out_features, in_features = weight.shape
        whole = in_features % max(2, self.blocksize) == 0
        if has_avx512bf16() and not (whole and out_features % 32 == 0):
            raise UnsupportedError(
                f"'{name}' is [{out_features}, {in_features}]; on this processor bitsandbytes takes"
                f" only out_features divisible by 32 and in_features by {self.blocksize}",
                hint=f"add skip={name}, or choose a smaller blocksize",
            )
        if torch.backends.cpu.get_cpu_capability() == "AVX512" and not whole:
            raise UnsupportedError(
                f"'{name}' has {in_features} in_features, which the blocksize {self.blocksize} does"
                " not divide; on this processor bitsandbytes dequantises such rows wrongly",
                hint=f"add skip={name}, or choose a smaller blocksize",
            )

    def convert(self, linear: nn.Module, weight: torch.Tensor) -> nn.Module:
        """A Linear4bit; bitsandbytes quantises when the parameter is moved to its device."""
        import bitsandbytes as bnb

        out_features, in_features = weight.shape
        with torch.device("meta"):
            new: Any = bnb.nn.Linear4bit(
                in_features,
                out_features,
                bias=False,
                compute_dtype=DTYPES[self.compute],
                compress_statistics=self.double,
                quant_type=self.quant_type,
            )
        codes: Any = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            blocksize=self.blocksize,
            compress_statistics=self.double,
            quant_type=self.quant_type,
            module=new,
        )
        new.weight = codes.to(weight.device)
        new.register_parameter("bias", bias_of(linear))
        new.source_cls = type(linear)  # transformers looks for it
        return new

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Convert, and say in what dtype bitsandbytes will really compute."""
        from bitsandbytes.functional import has_avx512bf16

        super().apply(model, ledger)
        device = next(model.parameters()).device
        packed = device.type == "cpu" and has_avx512bf16() and not enabled()
        actual = "bf16, all that its kernel for this processor has" if packed else self.compute
        ledger.receipt.actual[f"4-bit products asked for in {self.compute}"] = actual

    @contextmanager
    def trial(self, model: nn.Module) -> Iterator[None]:
        """Put layers back as they were: a forward pass repacks them for this processor, for good.

        Repacked layers have no gradient, and their absmax is rounded to bf16.
        """
        layers: list[Any] = [
            m for m in model.modules() if hasattr(getattr(m, "weight", None), "quant_state")
        ]
        before = [(m.weight, m.weight.data, copy(m.weight.quant_state)) for m in layers]
        try:
            yield
        finally:
            for layer, (weight, codes, state) in zip(layers, before, strict=True):
                weight.data, weight.quant_state = codes, state
                layer.quant_state = state

    def notes(self, machine: Machine, device: str) -> list[str]:
        """What happens at each call on a CPU."""
        if device != "cpu" or enabled():
            return []
        if "avx512_bf16" in machine.features:
            return [
                "on this processor bitsandbytes repacks 4-bit weights at their first use: products"
                " in bf16, absmax in bf16, whatever compute and double say"
            ]
        return ["bitsandbytes dequantises whole weights at each call on this processor"]
