"""What quantised linear layers share: a state dict that is bitsandbytes' own.

So whatever saves a state dict, safetensors, Trainer or `torch.save`, writes a bitsandbytes layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from featherweight.errors import ModelError
from featherweight.nn.frozen import FrozenLinear


class QuantisedLinear(FrozenLinear):
    """A linear layer of codes and absmax."""

    absmax: torch.Tensor

    def quantise(self, weight: torch.Tensor) -> None:
        """Take the codes of a weight [N, K], as the layer's options say.

        Raises UnsupportedError for a weight with NaN or infinity. A weight on the meta device
        leaves the layer empty: it is filled later.
        """
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The weight that the codes stand for, f32 [N, K]."""
        raise NotImplementedError

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors of the layer but its bias, under the names that bitsandbytes gives them."""
        raise NotImplementedError

    def take(self, stored: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `stored`, nothing copied; raises ModelError that names the tensor."""
        raise NotImplementedError

    def to_dense(self, dtype: torch.dtype) -> nn.Linear:
        """A dense layer of what the codes stand for."""
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(self.dequantize().to(dtype), requires_grad=False)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.data.to(dtype), requires_grad=False)
        return dense.train(self.training)

    def set_codes(self, codes: torch.Tensor) -> None:
        """Give the weight other codes; the parameter stays the same object."""
        if self.weight.is_meta or self.weight.device != codes.device:
            self.weight = nn.Parameter(codes, requires_grad=False)
        else:
            self.weight.data = codes

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """An empty layer, on the meta device, has the name of its weight alone to say."""
        named = {"weight": self.weight} if self.absmax.is_meta else self.stored()
        if self.bias is not None:
            named["bias"] = self.bias
        for name, tensor in named.items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take what belongs to the layer, all of it or nothing."""
        given = {k.removeprefix(prefix): t for k, t in state_dict.items() if k.startswith(prefix)}
        if not local_metadata.get("assign_to_params_buffers"):
            device = None if self.absmax.is_meta else self.absmax.device
            given = {name: tensor.to(device, copy=True) for name, tensor in given.items()}
        bias = given.pop("bias", None)
        wanted = [] if self.bias is None else ["bias"]
        missing_keys += [prefix + name for name in wanted if bias is None]
        if "weight" not in given:
            missing_keys.append(prefix + "weight")
            return
        try:
            if bias is not None:
                self._take_bias(bias)
            self.take(given)
        except ModelError as error:
            error_msgs.append(f"{prefix[:-1]}: {error}")

    def _take_bias(self, bias: torch.Tensor) -> None:
        if self.bias is None or bias.shape != self.bias.shape:
            has = "no bias" if self.bias is None else f"a bias of {list(self.bias.shape)}"
            raise ModelError(f"'bias' is {list(bias.shape)}, and the layer has {has}")
        self.bias = nn.Parameter(bias, requires_grad=self.bias.requires_grad)


def wanted(
    stored: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """One tensor of a layer; raises ModelError if it is missing or not of this dtype and shape."""
    if name not in stored:
        raise ModelError(f"'{name}' is missing")
    tensor = stored[name]
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
        kind, needed = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
        raise ModelError(
            f"'{name}' is {kind} {list(tensor.shape)}, where {needed} {list(shape)} belongs"
        )
    return tensor.contiguous()


def known(stored: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> None:
    """Raise ModelError for a tensor that no such layer has."""
    strange = sorted(set(stored) - set(names))
    if strange:
        raise ModelError(f"'{strange[0]}' is no tensor of such a layer")


def finite(**tensors: torch.Tensor) -> None:
    """Raise ModelError for NaN or infinity, by name; of tensors that have their values."""
    for name, tensor in tensors.items():
        if not tensor.is_meta and tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelError(f"'{name}' has NaN or infinity")
