"""Which attention kernel a CUDA GPU would run, and `scaled_dot_product_attention` by that kernel.

The rules are PyTorch's (aten/native/transformers/cuda/sdp_utils.cpp): flash attention where it
can, else the memory-efficient kernel, else plain arithmetic, which holds the score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featherweight.anatomy.gpus import Gpu

HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@dataclass
class Kernels:
    """Kernels that may be chosen from, and those that were: names in order of first use."""

    allowed: tuple[str, ...] = ("flash", "efficient", "math")

    def __post_init__(self) -> None:
        self.used: list[str] = []

    def note(self, name: str) -> str:
        """Remember a kernel that was chosen."""
        if name not in self.used:
            self.used.append(name)
        return name


def choose(
    gpu: Gpu,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    enable_gqa: bool = False,
    allowed: tuple[str, ...] = ("flash", "efficient", "math"),
) -> str:
    """`flash`, `efficient` or `math` for q [B, H, Sq, D], k and v [B, Hkv, Sk, D]."""
    head_dim = query.shape[-1]
    same_width = head_dim == value.shape[-1]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    flash = (
        gpu.capability >= (8, 0)
        and query.dtype in HALF
        and mask is None
        and same_width
        and head_dim <= 256
        # backward needs more shared memory than the smaller Ampere and Ada chips have
        and not (trains and head_dim > 192 and gpu.capability in ((8, 6), (8, 9)))
    )
    if flash and "flash" in allowed:
        return "flash"
    narrow = query.dtype is torch.bfloat16 and gpu.capability < (8, 0)
    efficient = query.dtype in (*HALF, torch.float32) and not narrow and not enable_gqa
    efficient = efficient and not (mask is not None and mask.requires_grad)
    if efficient and "efficient" in allowed:
        return "efficient"
    return "math"


def scaled_dot_product_attention(
    gpu: Gpu,
    kernels: Kernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of that name, by the operation that it would come to on this GPU."""
    enable_gqa = enable_gqa and key.shape[1] != query.shape[1]
    name = choose(gpu, query, key, value, attn_mask, enable_gqa=enable_gqa, allowed=kernels.allowed)
    kernels.note(name)
    if name == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = _additive(attn_mask, query)
    if name == "efficient":
        return _efficient(query, key, value, mask, dropout_p, is_causal, scale)
    options: dict[str, Any] = {"scale": scale}
    if enable_gqa:
        options["enable_gqa"] = True
    return _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, **options
    )[0]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, causal: bool, scale: float | None
) -> Tensor:
    """Head sizes that are no multiple of 8 are padded, and the output cut."""
    head_dim = query.shape[-1]
    pad = -head_dim % 8
    if pad:
        scale = scale or head_dim**-0.5
        query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if pad else out


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Rows of a mask lie 16 elements apart, and it is seen by all heads: [B, H, Sq, Sk]."""
    if mask is not None:
        pad = -mask.shape[-1] % 16
        if pad:
            mask = torch.nn.functional.pad(mask, (0, pad))[..., : key.shape[2]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, trains, dropout_p, causal, scale=scale
    )[0]


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of bools becomes one of zeros and minus infinity in the dtype of the query."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
