"""The state of everything random that training may draw from: torch, Python and numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotune.lazy import torch


class RandomState:
    """The present state of the generators of torch (of the CPU and of `device`), Python and numpy (where it is in use).

    Nothing waits for the device: a CUDA generator is a seed and an offset, both kept by the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cpu = torch.get_rng_state()
        self._own: Any = None if device.type == "cpu" else getattr(torch, device.type)  # e.g. `torch.cuda`
        self._own_state: Any = self._own and self._own.get_rng_state(device)

    def has_moved(self) -> bool:
        """Whether any of the generators has drawn since this state was taken."""
        if not torch.equal(self._cpu, torch.get_rng_state()) or self.has_moved_beside_torch():
            return True
        return self._own is not None and not torch.equal(self._own_state, self._own.get_rng_state(self._device))

    def has_moved_beside_torch(self) -> bool:
        """Whether Python's or numpy's generator has drawn since this state was taken."""
        if self._python != random.getstate():
            return True
        if self._numpy is None:
            return False
        now = sys.modules["numpy"].random.get_state()
        return bool(now[2:] != self._numpy[2:] or (now[1] != self._numpy[1]).any())

    def restore(self) -> None:
        """Put the generators back into this state, so that they draw the same numbers again."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._own is not None:
            self._own.set_rng_state(self._own_state, self._device)


@contextmanager
def keep_randomness(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random states at the end; those of a GPU too, if it is `device` or, by default, if this process uses one."""
    state = RandomState(device or torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
    try:
        yield
    finally:
        state.restore()


def seed_everything(seed: int) -> None:
    """Seed torch, random and (where it is in use) numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # it takes no larger one
