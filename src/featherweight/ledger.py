"""Apply a recipe to a model in place, and put everything back.

`apply` is the public verb. Techniques change the model only through a `Ledger`, which remembers
how to undo each step, last in first out, and sees to it that replaced weights really free their
memory: pages of a mapped checkpoint are given back to the system, other originals are kept,
spilled to disk (`spill_dir`) or dropped (`reversible=False`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from featherweight import verify as verification
from featherweight.errors import FeatherweightError, RecipeError, UnsupportedError
from featherweight.native import libc
from featherweight.receipt import Receipt
from featherweight.recipe import Recipe, name_of
from featherweight.residency import Mappings, give_back
from featherweight.spill import Spill
from featherweight.tensors import held, held_tensors

SPILL_BATCH = 256 << 20  # bytes of replaced originals before they are looked through and spilled

_applied: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()  # model → ids, in order
_ABSENT = object()


class Ledger:
    """The changes made to one model, and how to take them back."""

    def __init__(
        self, model: nn.Module, receipt: Receipt, *, reversible: bool, spill: Spill | None
    ) -> None:
        self.model = model
        self.receipt = receipt
        self.reversible = reversible
        self._spill = spill
        self._mappings = Mappings()
        self._undo: list[Callable[[], None]] = []
        self._retired: list[torch.Tensor] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the model, of a module or of a config."""
        before = getattr(owner, name, _ABSENT)
        inherited = name not in vars(owner)  # or absent, or kept under another name

        def back() -> None:
            if before is _ABSENT or (inherited and name in vars(owner)):
                with suppress(AttributeError):  # `model.dequantize()` has taken it away
                    delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self.remember(back)

    def replace_module(self, name: str, new: nn.Module) -> None:
        """Put `new` where the module with this dotted name is; the old one is kept for undo."""
        parent_name, _, child = name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        old = getattr(parent, child)
        setattr(parent, child, new)
        self.remember(lambda: setattr(parent, child, old))
        kept = {id(tensor) for tensor in held_tensors(new)}
        for tensor in held_tensors(old):
            if id(tensor) not in kept:
                self._retire(tensor)

    def replace_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Give a parameter or buffer other data; the tensor object itself stays."""
        old = tensor.data

        def back() -> None:
            tensor.data = old

        tensor.data = data
        self.remember(back)
        self._retire(old)

    def remember(self, back: Callable[[], None]) -> None:
        """Add a step to take back what was just changed, or is about to be."""
        if self.reversible:
            self._undo.append(back)

    def _retire(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor that was replaced, as far as undo allows."""
        if self._mappings.file_of(tensor):
            try:
                self.receipt.bytes_given_back += give_back(tensor)
            except OSError as error:  # no page map, or locked pages
                note = f"pages of the mapped checkpoint stay resident: {error.strerror}"
                if note not in self.receipt.notes:
                    self.receipt.notes.append(note)
        elif self._spill:
            self._retired.append(tensor)
            if sum(t.untyped_storage().nbytes() for t in self._retired) > SPILL_BATCH:
                self._flush()

    def _flush(self) -> None:
        """Spill retired storages, except those that the model still uses (tied weights)."""
        used = {t.untyped_storage().data_ptr() for t in held_tensors(self.model)}
        for tensor in self._retired:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in used:
                continue
            if storage.device.type == "cpu" and not storage.resizable():
                self.receipt.notes.append("an original that torch does not own stays in memory")
                continue
            assert self._spill is not None
            self._spill.put(storage)
        self._retired.clear()

    def settle(self) -> None:
        """Call once after the last change: spill what is left, return free memory."""
        if self._spill:
            self._flush()
        _return_free_memory()

    def mark(self) -> tuple[int, int]:
        """A point to go back to with `undo_to`."""
        return len(self._undo), len(self.receipt.changes)

    def undo_to(self, mark: tuple[int, int]) -> None:
        """Take back the changes made since `mark`, the last one first, and their lines."""
        steps, lines = mark
        self._retired.clear()
        if self._spill:
            self._spill.restore()  # the originals must be whole before they are put back
        while len(self._undo) > steps:
            self._undo.pop()()
        del self.receipt.changes[lines:]

    def undo(self) -> None:
        """Take every change back."""
        self.undo_to((0, len(self.receipt.changes)))
        if self._spill:
            self._spill.close()
        _return_free_memory()


def _return_free_memory() -> None:
    libc.malloc_trim()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Applied:
    """A recipe in force on a model: `.receipt` says what it did, `.undo()` takes it back.

    As a context manager it undoes itself at the end of the block.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, ledger: Ledger) -> None:
        self.model = model
        self.recipe = recipe
        self.receipt = ledger.receipt
        self._ledger: Ledger | None = ledger
        _applied.setdefault(model, []).append(id(self))

    def undo(self) -> None:
        """Restore every module, parameter, buffer and setting, bit for bit.

        Raises FeatherweightError if the recipe was applied with `reversible=False`, was undone
        already, or if a later recipe is still in force on the model.
        """
        if self._ledger is None:
            raise FeatherweightError(f"'{self.recipe}' was undone already")
        if not self._ledger.reversible:
            raise FeatherweightError(
                f"'{self.recipe}' was applied with reversible=False and cannot be undone",
                hint="load the model again",
            )
        stack = _applied.get(self.model, [])
        if stack and stack[-1] != id(self):
            raise FeatherweightError(
                f"'{self.recipe}' cannot be undone before what was applied after it",
                hint="undo in reverse order",
            )
        self._ledger.undo()
        self._ledger = None
        stack.pop()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ledger is not None and self._ledger.reversible:
            self.undo()

    def __repr__(self) -> str:
        return f"Applied({str(self.recipe)!r}, {self.receipt.changed()} changes)"


def apply(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    verify: bool = False,
    reversible: bool = True,
    spill_dir: str | Path | None = None,
    on_fallback: str = "error",
) -> Applied:
    """Apply a recipe to a model in place.

    Args:
        model: any `nn.Module`; attention techniques and `verify` need a transformers model.
        recipe: such as `"bf16+flash"` (see `featherweight.recipe`).
        verify: run a small padded batch before and after, and undo and raise if outputs differ
            by more than the techniques' tolerance.
        reversible: False drops the originals, so that undo is refused.
        spill_dir: folder on a disk for originals that are not views of a mapped checkpoint;
            without it they stay in memory until undo.
        on_fallback: `"error"`, or `"warn"` to leave out techniques that the model cannot have,
            with a note in the receipt.

    Raises:
        RecipeError, UnsupportedError, VerificationError, MissingExtraError; the model is as it
        was before in every case (with `reversible=False` unless a change was already made).
    """
    recipe = Recipe.parse(recipe)
    if on_fallback not in ("error", "warn"):
        raise FeatherweightError(f"on_fallback is '{on_fallback}'", hint="allowed: error, warn")
    if spill_dir is not None and not reversible:
        raise RecipeError("spill_dir keeps originals for undo, reversible=False drops them")
    receipt = Receipt(str(recipe), bytes_before=held(model).total)
    for technique in recipe:
        if on_fallback == "error":
            technique.check(model)  # all of them before the first change
    before = verification.outputs(model) if verify else None
    rounding = verification.tolerance(model, ())
    chosen = []
    spill = Spill(spill_dir) if spill_dir is not None else None
    ledger = Ledger(model, receipt, reversible=reversible, spill=spill)
    try:
        for technique in recipe:
            mark, changed = ledger.mark(), receipt.changed()
            try:
                technique.check(model)
                technique.apply(model, ledger)
                chosen.append(technique)
            except UnsupportedError as error:
                half_done = not reversible and receipt.changed() > changed
                if on_fallback == "error" or half_done:
                    raise
                ledger.undo_to(mark)
                receipt.notes.append(f"{name_of(technique)} left out: {error}")
        ledger.settle()
        if before is not None:
            with ExitStack() as trials:
                for technique in chosen:
                    trials.enter_context(technique.trial(model))
                after = verification.outputs(model)
            allowed = rounding + sum(technique.tolerance for technique in chosen)
            receipt.verified = verification.compare(before, after, allowed, str(recipe))
    except BaseException:
        ledger.undo()
        raise
    receipt.bytes_after = held(model).total
    return Applied(model, recipe, ledger)
