"""Expandable segments: the CUDA allocator lets its blocks grow in place, so that less memory lies idle in fragments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.devices.allocator_settings import NEWER, OLDER, settings_in, tells_settings
from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch, UnsupportedError
from autotune.techniques.frameworks import At, Lines, words

_ON = "expandable_segments:True"
# where both are set, torch reads the older name
_LINES = f"""
allocator = os.environ.get("{OLDER}", os.environ.get("{NEWER}"))
allocator = ",".join(filter(None, (allocator, "{_ON}")))
os.environ["{NEWER}"] = os.environ["{OLDER}"] = allocator
""".strip()
_NO_ALLOCATOR = "the CUDA allocator works on NVIDIA GPUs only"


class ExpandableSegments(Switch):
    """`expandable_segments` of torch's CUDA allocator, for the whole process.

    The allocator reads the setting whenever it needs a new segment. So it can be set when a session is prepared, even after CUDA is
    initialised; the environment variable would be read too early.
    """

    name = "expandable_segments"
    summary = "the CUDA allocator's blocks grow in place: less memory lost in fragments"
    applies = "GPUs"
    phase = Phase.PROCESS
    order = 30
    leanest = (True,)
    # Fragments are a tenth to a third of what the allocator holds; growing a block costs little.
    expected = Expectation(
        compute=Factor(spread=1.02),
        launch=Factor(spread=1.05),
        activations=Factor(typical=0.93, spread=1.07),
        state=Factor(typical=0.93, spread=1.07),
    )
    keeps_random_masks = True
    frameworks = words(torch=Lines({At.ENVIRONMENT: _LINES}))

    def allocator_settings(self, choice: Choice) -> str:
        return _ON if choice else ""

    def why_not(self, setting: Setting) -> str:
        if not setting.device.capabilities.own_allocator:
            return _NO_ALLOCATOR
        return "the environment switches it on already" if _ON in _settings().replace(" ", "") else ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Switch it on for whatever the allocator takes from now on."""
        if not build.device.capabilities.own_allocator:
            raise UnsupportedError(f"expandable_segments: {_NO_ALLOCATOR}")
        _set(",".join(filter(None, (_settings(), _ON))))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the allocator's settings. Before torch 2.10 they cannot be read, and so stay as long as the process."""
        before = _settings()
        try:
            yield
        finally:
            if _settings() != before:
                _set(before)


def _settings() -> str:
    """The allocator's settings; before torch 2.10 those that the environment gave it."""
    if tells_settings():
        return str(torch._C._accelerator_getAllocatorSettings())
    return settings_in(os.environ)


def _set(settings: str) -> None:
    """Set the allocator to `settings` and nothing else."""
    if tells_settings():
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)
