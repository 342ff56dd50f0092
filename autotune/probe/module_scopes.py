"""Follows a training step from module to module: hooks tell in the forward pass, the autograd graph's nodes in the backward pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autotune.records.explanation import BACKWARD, BATCH, FORWARD, LOSS, MODEL, STEP
from autotune.session import Session

_LARGEST_SEQUENCE = 2**63  # nodes that accumulate gradients have no place in the order, and 2**64 - 1 for it


@dataclass
class Stretch:
    """A stretch of a training step in which one module's code runs.

    Attributes:
        sequence: number of the first autograd node that can be made in it.
        note: what `Scopes.note` returned at its beginning.
    """

    phase: str
    module: str
    sequence: int
    note: Any


class Scopes:
    """The stretches of training steps. A forward pass that is run again in the backward pass is its module's, too.

    A node of the autograd graph was made by the module whose forward pass ran when its number was given. When the backward
    pass comes to it, that module's code runs. The time or memory between two nodes is the earlier one's.

    Args:
        note: called at the beginning of each stretch.

    Attributes:
        last_layer: the module that began last in a forward pass; empty where none did.
    """

    def __init__(self, session: Session, note: Callable[[], Any]) -> None:
        self.stretches: list[Stretch] = []
        self.last_layer = ""
        self._session = session
        self._note = note
        self._names = {id(module): name or MODEL for name, module in session.model.named_modules()}
        self._outer: list[str] = []
        self._phase = STEP
        self._after_layer: Stretch | None = None  # the model's own code after the layer that ran last

    def begin(self, phase: str, module: str) -> None:
        """Another stretch begins."""
        self._phase = phase
        self.stretches.append(Stretch(phase, module, torch._C._autograd._get_sequence_nr(), self._note()))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the session's forward passes; `begin` is called for all else."""
        loss = self._session.loss

        def observed(micro_batch: Any) -> torch.Tensor:
            self._outer.clear()
            self._after_layer = None
            self.begin(FORWARD, BATCH)
            result = loss(micro_batch)
            self.begin(BACKWARD, LOSS)
            self._follow_back(result)
            return result

        with (
            mock.patch.object(self._session, "loss", observed),
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        name = self._names.get(id(module))
        current = self.stretches[-1].module if self.stretches else LOSS
        self._outer.append(LOSS if current == BATCH else current)
        if name is not None:
            self.begin(self._phase, name)
            if self._phase == FORWARD and name != MODEL:
                self.last_layer = name

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        outer = self._outer.pop()
        name = self._names.get(id(module))
        if name is None:
            return
        if name == MODEL and self._after_layer is not None:
            self._after_layer.module = LOSS  # a model may compute its loss itself
            self._after_layer = None
        self.begin(self._phase, outer)
        if outer == MODEL:
            self._after_layer = self.stretches[-1]

    def _follow_back(self, loss: torch.Tensor) -> None:
        """Have every node of the graph tell when the backward pass comes to it."""
        sequences = [stretch.sequence for stretch in self.stretches]
        for node in graph_nodes(loss):
            if (number := node._sequence_nr()) < _LARGEST_SEQUENCE:
                module = self.stretches[bisect_right(sequences, number) - 1].module
                node.register_prehook(partial(self._come_to, module))

    def _come_to(self, module: str, gradients: Any) -> None:
        if self.stretches[-1].module != module:
            self.begin(BACKWARD, module)


def graph_nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Every node of the autograd graph that a loss hangs on."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]
