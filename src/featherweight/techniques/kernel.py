"""Which code the products of light layers run on: what the receipt says was used."""

from __future__ import annotations

from torch import nn

from featherweight import native


def kernel(model: nn.Module) -> str:
    """Such as "native avx2", or torch and why."""
    device = next(model.parameters()).device.type
    if device != "cpu":
        return f"torch, there is no kernel for {device}"
    status = native.status()
    return f"native {status.isa}" if status.available else f"torch, slowly: {status.error}"
