"""Existing bitsandbytes models on Featherweight's CPU kernels: `enable`, `disable`, `enabled`.

`import featherweight.bitsandbytes` switches the backend on, and so does FEATHERWEIGHT_BNB=1 when
bitsandbytes is imported, which loads `autoload` as one of its backends. Layers, codes and
checkpoints stay bitsandbytes' own. What computes with them on a CPU changes, until `disable`.

This module imports nothing large: every `import bitsandbytes` imports it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

VARIABLE = "FEATHERWEIGHT_BNB"

_REPACKS = "support_avx512bf16_for_cpu"  # the attribute of Linear4bit that lets forward() repack

_CASTS = "bitsandbytes.autograd._functions"  # logs that an int8 layer casts its input, each time

_library: Any = None  # the torch.library.Library that holds our kernels while the backend is on
_level = 0  # what level the logger of _CASTS had


def enabled() -> bool:
    """Whether bitsandbytes' CPU ops run on our kernels."""
    return _library is not None


def enable() -> None:
    """Switch the backend on, for all layers of this process; nothing happens if it is on.

    Layers that bitsandbytes repacked for AVX512-BF16 before stay on its own kernel for them.

    Raises:
        MissingExtraError without bitsandbytes, NativeError without the native library,
        UnsupportedError if this torch cannot give bitsandbytes' kernels back.
    """
    from featherweight.errors import MissingExtraError, NativeError, UnsupportedError

    global _library, _level
    try:
        import bitsandbytes  # noqa: F401  which may call `autoload`
    except ImportError:
        raise MissingExtraError("bitsandbytes", "bitsandbytes", "the backend") from None
    if enabled():
        return
    import torch
    from bitsandbytes.nn.modules import Linear4bit

    from featherweight import native

    if error := native.status().error:
        raise NativeError(f"bitsandbytes cannot run on Featherweight's kernels: {error}")
    if not hasattr(torch.library, "get_kernel"):
        raise UnsupportedError(
            f"torch {torch.__version__} cannot keep bitsandbytes' kernels while ours are in use",
            hint="install a torch that has torch.library.get_kernel",
        )
    from featherweight.integrations.bitsandbytes_kernels import register

    _library = register()
    # On the class, where it stands before what each layer keeps from when it was made.
    setattr(Linear4bit, _REPACKS, property(lambda layer: False, _keep))
    logger = logging.getLogger(_CASTS)
    _level = logger.level
    logger.addFilter(_once)


def disable() -> None:
    """Switch the backend off: bitsandbytes' own kernels again. Nothing happens if it is off."""
    global _library
    if not enabled():
        return
    from bitsandbytes.nn.modules import Linear4bit

    logger = logging.getLogger(_CASTS)
    logger.removeFilter(_once)
    logger.setLevel(_level)
    delattr(Linear4bit, _REPACKS)
    _library._destroy()
    _library = None


def autoload() -> None:
    """What `import bitsandbytes` calls. Never raises: stock stays, and a warning says why."""
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        enable()
    except Exception as error:  # also what nobody foresaw: the user asked to import bitsandbytes
        import warnings

        from featherweight.errors import FeatherweightError

        reason = error if isinstance(error, FeatherweightError) else repr(error)
        warnings.warn(f"{VARIABLE}=1 has no effect: {reason}", RuntimeWarning, stacklevel=2)


def _once(record: logging.LogRecord) -> bool:
    """Let the first warning of _CASTS through and no other: they take a third of a short call."""
    logging.getLogger(_CASTS).setLevel(logging.ERROR)
    return True


def _keep(layer: Any, value: bool) -> None:
    """What a layer made meanwhile finds out about the processor, for when the backend is off."""
    vars(layer)[_REPACKS] = value
