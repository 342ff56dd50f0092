"""A forward pass in the place of a module's own."""

from __future__ import annotations

from typing import Any

from autotune.lazy import torch


class Forward:
    """The `forward` of one module. An object, not a closure, so that a deep copy of the model computes with its own modules.

    Attributes:
        original: a forward that was replaced before on this very instance, by the user or a technique.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.original = vars(module).get("forward")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass as it was before."""
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def trains(self) -> bool:
        """Whether a backward pass may follow."""
        return self.module.training and torch.is_grad_enabled()
