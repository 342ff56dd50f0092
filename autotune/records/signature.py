"""What a model is made of, by which runs of like models find each other: plain data that no name, value or seed changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autotune.records.formats import Record


class LossKind(StrEnum):
    """Where a task's loss comes from."""

    WHOLE_STEP = "a step of the user's own"
    OWN = "a training_step of the user's own"
    MODULE = "a LightningModule"
    MODEL = "the model"
    CROSS_ENTROPY = "cross entropy"
    MEAN_SQUARED_ERROR = "mean squared error"


@dataclass(frozen=True, kw_only=True)
class Layer(Record):
    """Layers of one kind and shape.

    Attributes:
        kind: name of the class.
        shapes: of its own parameters, in the order in which it has them.
        count: how many such layers there are.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class ModelSignature(Record):
    """A model's architecture and its loss. Two models of one architecture have equal ones, and each field tells how others differ.

    Attributes:
        layers: modules that have parameters of their own, or no modules in them; sorted.
        num_parameters: elements of all parameters, tied ones counted once.
        dtypes: of the parameters, each once; sorted.
    """

    layers: tuple[Layer, ...]
    num_parameters: int
    dtypes: tuple[str, ...]
    loss: LossKind
