"""What stands in for the forward of a decoder's inner model."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from featherweight.errors import UnsupportedError
from featherweight.fastpath.block import Block
from featherweight.fastpath.cache import places_of
from featherweight.fastpath.executor import Executor
from featherweight.fastpath.known import blocks
from featherweight.fastpath.masks import NotServed, keys_seen
from featherweight.fastpath.weights import check, places

# Arguments that are looked at, or that change nothing here.
_KNOWN = {"use_cache", "return_dict", "cache_position", "output_attentions", "output_hidden_states"}


class FastForward:
    """Called as the inner model's `forward`; what it cannot serve goes to the original.

    `reasons` counts why that was. Does not keep the model alive, and goes with a copy of it.
    """

    def __init__(
        self,
        inner: Any,
        block: Block,
        format: torch.dtype,
        reasons: dict[str, int] | None = None,
    ) -> None:
        self._inner = weakref.ref(inner)
        self.block, self.format = block, format  # of keys and values in dynamic caches
        self.executor: Executor | None = None
        self.reasons = {} if reasons is None else reasons
        self._handles: int | None = None  # of hooks, that there were when none was found inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner model's own forward: last hidden states and the cache."""
        inner: Any = self._inner()
        if args:  # in the order of that architecture
            names = list(inspect.signature(type(inner).forward).parameters)[1:]
            kwargs |= dict(zip(names, args, strict=False))
        if kwargs.get("cache") is None:
            kwargs["cache"] = kwargs.pop("past_key_values", None)
        return self._call(inner, **kwargs)

    def _call(
        self,
        inner: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        want_states = _wanted(inner, kwargs, "output_hidden_states")
        states: list[torch.Tensor] | None = [] if want_states else None
        try:
            if cache is None and attention_mask is None and _packed(position_ids):
                raise NotServed("sequences packed into one")
            prompt = cache is None or not cache.get_seq_length()
            executor = self._executor(inner, given, kwargs, prompt)
            if cache is None and (inner.config.use_cache if use_cache is None else use_cache):
                cache = DynamicCache(config=inner.config)
            if inputs_embeds is None:
                inputs_embeds = inner.get_submodule(self.block.embedding)(input_ids)
            dtype = inputs_embeds.dtype
            cached = [] if cache is None else places_of(cache, executor.count, self.format, dtype)
            batch, tokens = given.shape[:2]
            past = cached[0].get_seq_length() if cached else 0
            seen = keys_seen(attention_mask, batch, past, tokens)
            window = executor.weights.window
            if getattr(attention_mask, "ndim", 2) == 4 and 0 < window < past + tokens:
                raise NotServed("a mask that says where the windows are")
            hidden = executor.run(inner, inputs_embeds, seen, position_ids, past, cached, states)
        except NotServed as reason:
            self.reasons[str(reason)] = self.reasons.get(str(reason), 0) + 1
            return type(inner).forward(
                inner,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds if input_ids is None else None,
                use_cache=use_cache,
                **kwargs,
            )
        hidden = hidden.to(inputs_embeds.dtype)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=None if states is None else (*states, hidden),
        )

    def _executor(self, inner: Any, given: Any, kwargs: dict[str, Any], prompt: bool) -> Executor:
        """For the weights as they are; raises NotServed with what is not served."""
        if given is None or given.device.type != "cpu":
            raise NotServed("no tensor on the CPU")
        if inner.training or (
            torch.is_grad_enabled()
            and (given.requires_grad or any(p.requires_grad for p in inner.parameters()))
        ):
            raise NotServed("gradients")
        if _wanted(inner, kwargs, "output_attentions"):
            raise NotServed("output_attentions")
        if kwargs.get("return_dict") is False:
            raise NotServed("return_dict=False")
        strange = next((n for n, v in kwargs.items() if n not in _KNOWN and v is not None), None)
        if strange:
            raise NotServed(f"the argument {strange}")
        current = self.executor
        prompt = prompt or given.shape[1] > 1  # looked at for each prompt, not for each token
        if current is None or prompt or self._handles != RemovableHandle.next_id:
            self._handles = None
            if any(_hooked(module) for module in inner.modules() if module is not inner):
                raise NotServed("hooks on modules inside")
            self._handles = RemovableHandle.next_id
            if current is None or current.weights.places != places(inner, self.block):
                try:
                    check(inner, self.block)
                except UnsupportedError as error:
                    raise NotServed(error.message) from error
                current = self.executor = Executor(inner, self.block, self.format)
        return current

    def __deepcopy__(self, memo: dict[int, Any]) -> FastForward:
        return FastForward(memo[id(self._inner())], self.block, self.format)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._inner(), self.format)


def _again(inner: Any, format: torch.dtype) -> FastForward:
    """For a copy, by what its class is called: functions in a block cannot be pickled."""
    return FastForward(inner, blocks()[type(inner).__name__], format)


def _packed(position_ids: torch.Tensor | None) -> bool:
    """Whether positions begin anew within a row, which transformers takes for several texts."""
    return position_ids is not None and bool((position_ids.diff() != 1).any())


def _wanted(inner: Any, kwargs: dict[str, Any], name: str) -> bool:
    """What is asked for, or else set in the config."""
    asked = kwargs.get(name)
    return bool(getattr(inner.config, name, False) if asked is None else asked)


def _hooked(module: Any) -> bool:
    """Whether somebody listens to it, other than transformers, which records hidden states so."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not str(hook.__module__).startswith("transformers.") for hook in hooks)
