"""`fastpath`: all layers of a decoder in one native call for a chunk of tokens.

The weights stay as they are, in whatever format a quantiser has left them. What the fast path
cannot serve (gradients, attentions, unusual masks and caches) goes to the model's own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featherweight import native
from featherweight.errors import UnsupportedError
from featherweight.techniques.base import Technique, option
from featherweight.techniques.kernel import kernel

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class FastPath(Technique):
    """One native call instead of a dozen small operations a layer."""

    slot: ClassVar[str] = "forward"
    tolerance: ClassVar[float] = 0.02
    cache: str = option(
        "fp32", choices=("fp32", "bf16", "fp16", "int8"), help="format of keys and values"
    )

    def check(self, model: Any) -> None:
        """The native library is there, and knows the architecture and every layer."""
        from featherweight.fastpath import weights
        from featherweight.fastpath.known import inner_of

        inner, block = inner_of(model)
        status = native.status()
        if not status.available:
            raise UnsupportedError(f"the fast path needs the native library: {status.error}")
        parameter = next(inner.parameters())
        if parameter.device.type != "cpu":
            raise UnsupportedError(f"the fast path is for CPUs; the model is on {parameter.device}")
        weights.check(inner, block)

    def apply(self, model: Any, ledger: Ledger) -> None:
        """Put the fused forward before the inner model's own."""
        from featherweight.fastpath.cache import FORMATS
        from featherweight.fastpath.forward import FastForward
        from featherweight.fastpath.known import inner_of

        inner, block = inner_of(model)
        name = next(name for name, module in model.named_modules() if module is inner)
        for layer in block.layer_list(inner):
            for path in block.projections.values():
                _stand_upright(layer.get_submodule(path), ledger)
        not_served = ledger.receipt.not_served
        forward = FastForward(inner, block, FORMATS[self.cache], not_served)
        ledger.set(inner, "forward", forward)
        layers = len(block.layer_list(inner))
        ledger.receipt.record(
            name or type(inner).__name__, "changed", f"{layers} layers → one call"
        )
        ledger.receipt.actual["layers"] = f"{kernel(model)}, keys and values in {self.cache}"


def _stand_upright(module: Any, ledger: Ledger) -> None:
    """Give a Conv1D the same weight [K, N] in the memory of its transpose, rows after rows."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D) and not module.weight.T.is_contiguous():
        ledger.replace_data(module.weight, module.weight.data.T.contiguous().T)


TECHNIQUE = FastPath
