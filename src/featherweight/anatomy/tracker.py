"""Follow every storage of a program: when it is allocated, when it dies, and what it is for.

Works on real tensors and, which is the point, on fake ones. Needs torch alone, so that the same
tracker runs beside any version of transformers.
"""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from featherweight.anatomy.trace import CATEGORIES, TEMPORARY, Block, Trace

# Bytes that a kernel allocates inside, while its outputs exist already, and frees when it ends.
Inside = Callable[[Any, tuple, Any], int]
_RANK = {name: rank for rank, name in enumerate(CATEGORIES)}
_COMPARED = {
    getattr(torch.ops.aten, name).Scalar: getattr(operator, name)
    for name in ("lt", "le", "gt", "ge")
}


class Tracker(TorchDispatchMode):
    """A context: what runs inside is traced into `.trace`.

    Enter it after a `FakeTensorMode`, so that it sees operations first. `inside` gives what the
    kernels of a device allocate unseen. `truth` answers a program that asks whether a fake tensor
    is true: in the code of transformers the question is whether a mask hides nothing. A number that
    is drawn alone is 1, so that no layer is left out by chance (LayerDrop).
    """

    def __init__(self, inside: Inside | None = None, *, truth: bool = True) -> None:
        super().__init__()
        self.trace = Trace()
        self._truth = truth
        self._inside = inside
        self._known: dict[int, tuple[weakref.ref, int]] = {}  # storage → its ref and block
        self._names: dict[int, str] = {}  # id of a module → name
        self._layers: set[int] = set()  # ids of modules that repeat
        self._modules: list[tuple[str, int]] = []  # being run: name, blocks when it began
        self._forward: list[tuple[int, str]] = []  # autograd's numbers as modules begin and end
        self._vocabulary = 0
        self._paused = False
        self._stack = ExitStack()

    def watch(self, model: nn.Module) -> None:
        """Name a model's modules, and take its parameters and buffers as weights."""
        self._names |= {id(m): name for name, m in model.named_modules()}
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                self._layers |= {id(child) for child in module}
        config = getattr(model, "config", None)
        self._vocabulary = getattr(config, "vocab_size", 0) or 0
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.label([tensor], "weights", module=name.rpartition(".")[0])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient)

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.label([parameter.grad], "gradients")

    def label(self, tensors: Iterable[Any], category: str, module: str | None = None) -> None:
        """Say what tensors are for; those not seen yet are taken as allocated now.

        Nothing is, while paused.
        """
        if self._paused:
            return
        for tensor in tensors:
            for plain in _plain(tensor):
                index = self._see(plain, "")
                if index is None:
                    continue
                block = self.trace.blocks[index]
                if _RANK[category] < _RANK[block.category]:
                    block.category = category
                if module is not None:
                    block.module = module

    def phase(self, name: str) -> None:
        """Begin a phase. What forward leaves behind for backward is saved activations."""
        if name == "backward":
            self._save_since(0)
        self.trace.phases.append((len(self.trace.events), name))

    def born_since(self, block: int) -> list[Block]:
        """Blocks that came from this number on and are alive."""
        return [b for b in self.trace.blocks[block:] if b.died < 0]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around an optimizer's step: what it makes and keeps is its state."""
        self.phase("optimizer")
        first = len(self.trace.blocks)
        yield
        for block in self.born_since(first):
            if block.category == TEMPORARY:
                block.category = "optimizer state"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run something unseen: what it leaves is taken up when it is labelled."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def hold(self, nbytes: int, category: str, operation: str) -> None:
        """Add a block that no tensor stands for and that stays."""
        self._birth(nbytes, category, operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if hasattr(args[0], "_drawn"):
                return args[0]._drawn
            if args[0].dtype is torch.bool:
                return self._truth
            if args[0].is_floating_point():
                return 1.0  # a count of steps, a norm: nothing that sizes depend on
        out = _run(func, args, dict(kwargs or {}))
        if func is torch.ops.aten.rand.default and out.dim() == 0:
            out._drawn = 1.0
        elif func in _COMPARED and hasattr(args[0], "_drawn"):
            out._drawn = _COMPARED[func](args[0]._drawn, args[1])
        if self._paused:
            return out
        name = func._schema.name.rpartition("::")[2]
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, name)
        extra = self._inside(func, args, out) if self._inside else 0
        if extra:
            self._death(self._birth(extra, "workspace", name))
        return out

    def _see(self, tensor: torch.Tensor, operation: str) -> int | None:
        """The block of a tensor's storage, which is born now if it was unknown."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            _, index = self._known[key]
            if self.trace.blocks[index].nbytes == nbytes:
                return index
            self._forget(key)  # it was resized
        if not nbytes:
            return None
        index = self._birth(nbytes, TEMPORARY, operation)
        shape = tensor.shape
        if self._vocabulary and len(shape) > 1 and shape[-1] == self._vocabulary:
            self.trace.blocks[index].category = "logits and loss"
        self._known[key] = (weakref.ref(storage, lambda _: self._forget(key)), index)
        return index

    def _birth(self, nbytes: int, category: str, operation: str) -> int:
        index = len(self.trace.blocks)
        block = Block(nbytes, category, self._module(), operation, len(self.trace.events))
        self.trace.blocks.append(block)
        self.trace.events.append(1 + index)
        return index

    def _death(self, index: int) -> None:
        self.trace.blocks[index].died = len(self.trace.events)
        self.trace.events.append(-1 - index)

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._death(known[1])

    # where in the model

    def _module(self) -> str:
        """The module being run; in backward, the one whose forward made the autograd node."""
        if self._modules:
            return self._modules[-1][0]
        node = torch._C._current_autograd_node()
        if node is None or not self._forward:
            return ""
        at = bisect_right(self._forward, node._sequence_nr(), key=lambda entry: entry[0]) - 1
        return self._forward[at][1] if at >= 0 else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        self._modules.append((name, len(self.trace.blocks)))
        self._mark(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names or not self._modules:
            return
        _, first = self._modules.pop()
        self._mark(self._modules[-1][0] if self._modules else "")
        if id(module) in self._layers and torch._C._current_autograd_node() is not None:
            self._save_since(first)  # a layer computed again, for its own backward

    def _mark(self, name: str) -> None:
        if torch._C._current_autograd_node() is None:
            self._forward.append((torch.autograd._get_sequence_nr(), name))

    def _save_since(self, first: int) -> None:
        for block in self.born_since(first):
            if block.category == TEMPORARY:
                block.category = "saved activations"

    def __enter__(self) -> Tracker:
        # Also where a layer that is computed again stops early, which it does by an exception.
        leave = register_module_forward_hook(self._leave, always_call=True)
        for handle in (register_module_forward_pre_hook(self._enter), leave):
            self._stack.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()
        self._known.clear()  # what dies from here on is no part of the program


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operation; lists of tensors one by one, as a device does with one launch."""
    name = func._schema.name
    if name.startswith("aten::_foreach_") and not name.endswith("_"):
        return _for_each(name, args, kwargs)
    if name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_")):
        return args[0] if func._schema.returns else None  # in place: nothing is allocated
    if name == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
        return _grouped(*args, **kwargs)  # the shape rule of torch takes bf16 alone, kernels do not
    return func(*args, **kwargs)


def _grouped(
    left: torch.Tensor, right: torch.Tensor, offs: Any, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Rows of experts times their weights: [T, K] × [E, K, N] → [T, N]; of gradients [E, M, N]."""
    if left.ndim == 2 and right.ndim == 2:
        shape = (offs.shape[0], left.shape[0], right.shape[1])
    else:
        shape = (*left.shape[:-1], right.shape[-1])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _for_each(name: str, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Results of `_foreach_…`: as large as the first tensors, but for norms, which are scalars."""
    if name == "aten::_foreach_norm":
        return [tensor.new_empty((), dtype=kwargs.get("dtype")) for tensor in args[0]]
    return [torch.empty_like(tensor) for tensor in args[0]]


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors with storage of their own that a tensor, or a subclass of tensors, is made of."""
    if not isinstance(tensor, torch.Tensor):
        return
    parts: list[str] = []
    with suppress(AttributeError, NotImplementedError):
        parts = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    if not parts:
        yield tensor
    for part in parts:
        yield from _plain(getattr(tensor, part))
