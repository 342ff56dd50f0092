"""The types of the rules for what an operator allocates."""

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
    """Memory that operators allocate and fake tensors do not show.

    Attributes:
        workspace: returns the rule of an operator, or None.
        results: the rules of operators whose results are larger than fake tensors show.
    """

    workspace: Callable[[Any], Workspace | None]
    results: Mapping[Any, ResultRule]
