"""Which attention kernel a CUDA GPU would run, and `scaled_dot_product_attention` by that kernel.

The rules are PyTorch's (aten/native/transformers/cuda/sdp_utils.cpp): cuDNN's where a new torch
prefers it, flash attention where it can, else the memory-efficient kernel, else plain arithmetic,
which holds the score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featherweight.anatomy.gpus import Gpu

HALF = (torch.float16, torch.bfloat16)
ALL = ("cudnn", "flash", "efficient", "math")
_aten = torch.ops.aten


@dataclass
class Kernels:
    """Kernels that may be chosen from, and those that were: names in order of first use."""

    allowed: tuple[str, ...] = ALL

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
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    allowed: tuple[str, ...] = ALL,
) -> str:
    """`cudnn`, `flash`, `efficient` or `math` for q [B, H, Sq, D], k and v [B, Hkv, Sk, D]."""
    wide, out = query.shape[-1], value.shape[-1]
    modern = gpu.capability >= (8, 0)
    half = query.dtype in HALF and (modern or query.dtype is torch.float16)
    if mask is not None and mask.requires_grad:
        return "math"
    can = {
        "cudnn": half
        and gpu.capability in ((9, 0), (10, 0))
        and max(wide, out) <= (256 if gpu.capability == (9, 0) else 128)
        and not wide % 8
        and not out % 8
        and key.shape[2] > 1
        and not (query.shape[2] == 1 and dropout_p),
        "flash": half
        and modern
        and mask is None
        and wide == out <= 256
        and not (is_causal and query.shape[2] != key.shape[2])
        and not (_trains(query, key, value) and _too_wide_backward(gpu, wide, dropout_p)),
        "efficient": (half or query.dtype is torch.float32)
        and not enable_gqa
        and not wide % _alignment(gpu, half)
        and not out % _alignment(gpu, half),
    }
    return next((name for name in ALL if name in allowed and can.get(name)), "math")


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _too_wide_backward(gpu: Gpu, head_dim: int, dropout_p: float) -> bool:
    """Flash backward needs more shared memory there than these chips have."""
    small = (8, 6) <= gpu.capability <= (8, 9) or (12, 0) <= gpu.capability <= (12, 1)
    return small and (192 < head_dim <= 224 or (head_dim > 224 and dropout_p > 0))


def _alignment(gpu: Gpu, half: bool) -> int:
    """What the memory-efficient kernel wants head sizes to be multiples of."""
    if half:
        return 8 if gpu.capability >= (7, 0) else 1
    return 4 if gpu.capability >= (8, 0) else 1


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
    name = choose(
        gpu,
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        allowed=kernels.allowed,
    )
    kernels.note(name)
    if name in ("cudnn", "flash"):  # both keep q, k, v, the output and one number a row
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
    trains = _trains(query, key, value)
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, trains, dropout_p, causal, scale=scale
    )[0]


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of bools becomes one of zeros and minus infinity in the dtype of the query."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
