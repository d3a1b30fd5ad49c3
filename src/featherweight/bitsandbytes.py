"""Importing this module runs bitsandbytes' layers on Featherweight's CPU kernels.

    import featherweight.bitsandbytes

See `featherweight.integrations.bitsandbytes`, whose functions are here too.
"""

from __future__ import annotations

from featherweight.integrations.bitsandbytes import disable, enable, enabled

__all__ = ["disable", "enable", "enabled"]

enable()
