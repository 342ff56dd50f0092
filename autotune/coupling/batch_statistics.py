"""Batch normalisation with the statistics of one batch held still, so that cutting it changes nothing but the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def hold_still(model: torch.nn.Module, run: Callable[[], object]) -> Iterator[None]:
    """Let each batch normalisation take the statistics that it saw last in `run`, a forward pass, for those of every batch.

    What it normalises over is a matter of its own: micro batches of such a model learn otherwise, whatever the loss is.
    """
    modules = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    if not modules:
        yield
        return
    before = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        for module in modules:
            like = next(module.parameters(), torch.empty(0, device=next(model.parameters()).device))
            module.running_mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
            module.running_var = torch.ones_like(module.running_mean)
            module.num_batches_tracked = None
            module.track_running_stats, module.momentum = True, 1.0  # the last batch alone counts
        with torch.no_grad():
            run()
        for module in modules:
            module.training = False
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            vars(module).update(attributes)
            module._buffers.update(buffers)
