"""`flash`: attention by a flash kernel, or an error that says why not; never a silent fallback.

torch's scaled_dot_product_attention has flash kernels for CPU and CUDA, and quietly runs another
kernel where they do not fit (dtype, head size, dropout; on CUDA any padding mask). Here the others
are switched off for the length of the call, so that torch refuses instead.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.backends import cuda as backends
from torch.nn import functional as F

from featherweight.errors import UnsupportedError
from featherweight.nn.frozen import FrozenEmbedding
from featherweight.techniques.attention import Attention, set_implementation

if TYPE_CHECKING:
    from featherweight.ledger import Ledger

# Not "…flash…": transformers would take that for the flash-attn package and leave out the mask.
IMPLEMENTATION = "featherweight_sdpa"

OTHERS = (
    (backends.math_sdp_enabled, backends.enable_math_sdp),
    (backends.mem_efficient_sdp_enabled, backends.enable_mem_efficient_sdp),
    (backends.cudnn_sdp_enabled, backends.enable_cudnn_sdp),
)


_lock = threading.Lock()
_inside = 0  # calls under way, of all threads
_before: list[bool] = []


@contextmanager
def only_flash() -> Iterator[None]:
    """Leave torch no other attention kernel (`sdpa_kernel` does the same in 15 µs more a call).

    torch keeps the switches for the whole process: an attention that another thread runs at this
    moment finds them off too. The last thread to leave puts them back.
    """
    global _inside, _before
    with _lock:
        if not _inside:
            _before = [enabled() for enabled, _ in OTHERS]
            for _, enable in OTHERS:
                enable(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                for (_, enable), was in zip(OTHERS, _before, strict=True):
                    enable(was)


def flash_attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, S, D]
    key: torch.Tensor,  # [B, H_kv, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention, flash kernels only; raises UnsupportedError with the reason."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def run() -> tuple[torch.Tensor, None]:
        with only_flash():
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    try:
        return run()
    except RuntimeError as error:
        if not _refused(error):
            raise
        raise UnsupportedError(
            f"flash attention cannot run here ({_describe(query, attention_mask)}): {_reason(run)}",
            hint="use 'sdpa', which may pick another kernel",
        ) from None


@dataclass(frozen=True)
class Flash(Attention):
    """torch's flash kernels and nothing else."""

    implementation: ClassVar[str] = IMPLEMENTATION

    def check(self, model: Any) -> None:
        """Refuse also models that do not go through torch's own attention."""
        super().check(model)
        if not model._supports_sdpa:
            raise UnsupportedError(
                f"{type(model).__name__} supports no scaled_dot_product_attention",
                hint="use 'eager'",
            )

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Try the kernel at the model's device, dtype and head size, then switch to it."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        masked = _try(model)
        AttentionInterface.register(IMPLEMENTATION, flash_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
        set_implementation(model, IMPLEMENTATION, ledger)
        ledger.receipt.actual["attention"] = "flash kernel of torch's SDPA"
        if masked is not None:
            ledger.receipt.notes.append(f"padded batches will raise: {masked}")


def _try(model: Any) -> str | None:
    """Run one attention as the model would; UnsupportedError if flash cannot.

    Returns why it cannot with a padding mask, or None if it can.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    weight = next(p for p in model.parameters() if p.is_floating_point())
    # Activations have the dtype that a light embedding gives, whatever its weight is kept in.
    light = next((m for m in model.modules() if isinstance(m, FrozenEmbedding)), None)
    dtype = model.dtype if light is None else light.dtype
    query = torch.zeros(1, heads, 4, head_dim, dtype=dtype, device=weight.device)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=weight.device)

    def attend(mask: torch.Tensor | None) -> torch.Tensor:
        with only_flash():
            return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    try:
        attend(None)
    except RuntimeError as error:
        if not _refused(error):
            raise
        raise UnsupportedError(
            f"flash attention cannot run here ({_describe(query, None)}):"
            f" {_reason(lambda: attend(None))}",
            hint="use 'sdpa', or another dtype, such as 'bf16+flash'",
        ) from None
    try:
        attend(mask)
    except RuntimeError as error:
        if not _refused(error):
            raise
        return _reason(lambda: attend(mask))
    return None


def _refused(error: RuntimeError) -> bool:
    return "No available kernel" in str(error) or "No viable backend" in str(error)


def _describe(query: torch.Tensor, mask: torch.Tensor | None) -> str:
    dtype = str(query.dtype).removeprefix("torch.")
    padding = "with a mask" if mask is not None else "no mask"
    return f"{query.device.type}, {dtype}, head_dim {query.shape[-1]}, {padding}"


def _reason(run: Any) -> str:
    """What torch says when asked again: it gives its reasons as warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(RuntimeError):
            run()
    said = [str(w.message).split(" (Triggered internally")[0].strip() for w in caught]
    reasons = [line for line in said if line and "not used because" not in line]
    return reasons[0] if reasons else "torch has no flash kernel for this dtype and device"


TECHNIQUE = Flash
