"""The base class of methods that divide the demonstrations into windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_eval_icl.methods.base import Method, Whole


@dataclass(frozen=True)
class Windowed(Method):
    """Windows of adjacent demonstrations.

    Args:
        window_size: how many demonstrations share a window, at most all of them; the last window may have fewer.
    """

    # With `repeat`, every window repeats its own demonstrations; if False, the repeated sequence is divided.
    windows_repeat: ClassVar[bool] = False

    window_size: Whole = 1

    def why_not(self, n: int) -> str:
        """A window must not be larger than the number of demonstrations."""
        n *= 1 if self.windows_repeat else self.repeat
        if self.window_size <= max(n, 1):
            return ""
        return f"window_size={self.window_size}: more than the {n} demonstrations; lower it"
