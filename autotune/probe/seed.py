"""Seeds for everything random, so that two runs of one config draw the same."""

from __future__ import annotations

import random
import sys


def seed_everything(seed: int) -> None:
    """Seed torch, random and (where it is in use) numpy."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
