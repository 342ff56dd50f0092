"""The form of rules for what an operator allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# From an operator's arguments and its result: bytes that it allocates and frees again beside the result.
Workspace = Callable[[tuple[Any, ...], Any], int]
# Likewise: tensors of its result whose storage has more bytes than it seems.
Storages = list[tuple[torch.Tensor, int]]
ResultRule = Callable[[tuple[Any, ...], Any], Storages]


@dataclass(frozen=True)
class Hidden:
    """What operators allocate that fake tensors do not show.

    Attributes:
        workspace: the rule of an operator, or None.
        results: by operator, where a result is larger than it seems.
    """

    workspace: Callable[[Any], Workspace | None]
    results: Mapping[Any, ResultRule]
