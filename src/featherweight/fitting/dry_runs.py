"""Many dry runs of one model on one device, under one limit of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from featherweight.anatomy import gpus
from featherweight.anatomy.asked import Asked
from featherweight.anatomy.result import Memory
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError
from featherweight.recipe import Recipe
from featherweight.sizes import parse_size

Progress = Callable[[str, float | None], None]  # what is being done, seconds left


@dataclass
class DryRuns:
    """Called with a recipe and a workload; what was run before is not run again.

    `asked` says all but these two.
    """

    asked: Asked
    progress: Progress | None = None
    notes: list[str] = field(default_factory=list)  # of all runs, each once
    _done: dict[tuple[str, Work], Memory] = field(default_factory=dict)

    def __call__(self, recipe: Recipe, work: Work) -> Memory:
        """Raises as `featherweight.memory`."""
        key = (str(recipe), work)
        if key not in self._done:
            self.tell(f"dry run of {recipe}: {work.described()}")
            found = replace(self.asked, recipe=recipe, work=work).predict()
            self.notes += [note for note in found.notes if note not in self.notes]
            self._done[key] = found
        return self._done[key]

    @property
    def count(self) -> int:
        """Dry runs done."""
        return len(self._done)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU was named."""
        return self.asked.gpu is not None

    def tell(self, doing: str) -> None:
        """Report progress, if anybody wants to know."""
        if self.progress:
            self.progress(doing, None)


def limit(memory: int | str | None, gpu: gpus.Gpu | None) -> tuple[int, str]:
    """Bytes allowed, and where the number comes from.

    Raises FeatherweightError for what is no size.
    """
    if isinstance(memory, str):
        memory = parse_size(memory)
    if memory is not None:
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
            raise FeatherweightError(
                f"memory is {memory!r}", hint="write 12GiB, 8GB or a number of bytes"
            )
        return memory, "as asked"
    if gpu:
        return gpu.memory, f"all of {gpu.name}"
    from featherweight import machine

    return machine.describe().memory_available, "available on this machine now"
