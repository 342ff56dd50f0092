"""What a search knows of a task before its first probe, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from autotune.records.check import Coupling
from autotune.records.config import ACCUMULATION, ALONE, BATCH_KEYS, BATCH_SIZE, Choice, World
from autotune.records.device import NO_COMMUNICATORS, Communicators, DeviceInfo
from autotune.records.formats import Record


class LossKind(StrEnum):
    """Where a task's loss comes from."""

    WHOLE_STEP = "a step of the user's own"
    OWN = "a training_step of the user's own"
    MODULE = "a LightningModule"
    MODEL = "the model"
    CROSS_ENTROPY = "cross entropy"
    MEAN_SQUARED_ERROR = "mean squared error"


STEP_SAMPLES = 2  # of the step that an inspection takes, if no other number is the only legal one


@dataclass(frozen=True, kw_only=True)
class Layer(Record):
    """Layers of one kind and shape.

    Attributes:
        kind: name of the class.
        shapes: shapes of a layer's own parameters, in the layer's order.
        count: how many such layers there are.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class ModelSignature(Record):
    """A model's architecture and loss, by which runs of similar models find each other.

    Names, values and seeds do not enter. Models of one architecture have equal signatures; otherwise the fields show what differs.

    Attributes:
        layers: modules that have parameters of their own, or no submodules; sorted.
        num_parameters: elements of all parameters, tied ones counted once.
        dtypes: types of the parameters, each once; sorted.
    """

    layers: tuple[Layer, ...]
    num_parameters: int
    dtypes: tuple[str, ...]
    loss: LossKind


@dataclass(frozen=True, kw_only=True)
class Support:
    """Whether a technique applies to a task on a device, as plain data.

    Attributes:
        choices: what may be searched, `off` included, in increasing order where there is an order. Only `off`: not applicable.
        reason: why it does not apply, or why some choices are left out; empty when all is as usual.
        optional: choices that are searched only when the user includes the technique (most change what is learned).
        note: what a reader of the answer has to know; goes to the result's warnings when the technique is used.
        untraceable: choices whose memory is learned from probes alone, each with the reason why it cannot be traced.
        setup_s: choices that are optional only because they cost time, each with the seconds that a config with it is
            expected to take before its first step, with cold caches. A search that has the time tries them unasked.
        always: choices that act in every config of this task, even in those that `Technique.is_redundant` rules out.
    """

    choices: tuple[Choice, ...]
    reason: str = ""
    optional: tuple[Choice, ...] = ()
    note: str = ""
    untraceable: tuple[tuple[Choice, str], ...] = ()
    setup_s: tuple[tuple[Choice, float], ...] = ()
    always: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BatchSupport:
    """Which micro batches and accumulation steps may be searched for a task.

    Attributes:
        sizes: micro batch sizes, in increasing order.
        accumulation_steps: searched without being asked for.
        optional_sizes: searched only when the user includes `batch_size`: they change what is learned.
        optional_accumulation_steps: searched only when the user includes `accumulation_steps`: they change what is learned.
        stays_whole: the baseline's micro batch is not cut to make it fit, since smaller ones learn, or may learn, something else.
        sizes_reason, reason: why some sizes, or some accumulation steps, are left out; empty when none is.
        note: goes to the result's warnings when accumulation differs from the baseline's.
    """

    sizes: tuple[int, ...]
    optional_sizes: tuple[int, ...] = ()
    accumulation_steps: tuple[int, ...] = (1,)
    optional_accumulation_steps: tuple[int, ...] = ()
    sizes_reason: str = ""
    reason: str = ""
    note: str = ""
    stays_whole: bool = False

    @property
    def warning(self) -> str:
        """Why what the baseline takes at once is left as it is; empty where it may be changed."""
        return self.reason if self.stays_whole else self.sizes_reason if self.optional_sizes else ""


def optimizer_name(kind: type) -> str:
    """An optimizer's class, written as in `TaskFacts.optimizer`."""
    return kind.__name__ if kind.__module__.startswith("torch.optim.") else f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class TaskFacts(Record):
    """A task as plain data. Fields with a default are unknown for a command's task and in older tables.

    Attributes:
        source_hash: changes with the task's code.
        num_parameters: elements of all parameters, tied ones counted once; `num_trainable`: those that require a gradient.
        parameter_bytes: memory of the parameters and buffers as built.
        optimizer: class of the optimizer: `AdamW` for torch's own, `package.module.Own` for others; empty where there are several.
        dataset_size: samples in the training set; None without one, or for a stream of more than 512.
        has_batchnorm: batch normalisation makes the micro batch part of what is learned.
        baseline: what the user runs today, as a partial config dict; None if not given.
        batch: type and shape of each tensor of a small batch, e.g. `float32 (2, 3, 224, 224)`. The batch has two samples, by
            `make_batch` or the training set's first. Empty if shapes differ from call to call.
        widest: positions of up to 512 sampled members of the training set, the widest first.
        tokens_per_sample: what `loss_weight` counts in a small batch, per sample; None without `loss_weight`, or if at most 1.
        evaluates: whether the batch size for evaluation is searched, too.
        eval_samples: samples in the evaluation set, counted as in `dataset_size`.
        parts: names of the functions and constants that the model file defines for the task; also `LightningModule` or
            `PreTrainedModel`, where the model is one or contains one.
        warnings: what the user should know about how the task was read.
    """

    name: str
    source_hash: str
    num_parameters: int | None = None
    num_trainable: int | None = None
    parameter_bytes: int | None = None
    optimizer: str = ""
    dataset_size: int | None = None
    has_batchnorm: bool = False
    global_batch: int | None = None
    baseline: dict[str, Choice] | None = None
    batch: tuple[str, ...] = ()
    widest: tuple[int, ...] = ()
    tokens_per_sample: float | None = None
    evaluates: bool = False
    eval_samples: int | None = None
    parts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def gradients_bytes(self) -> int:
        """Of all trained parameters, in their own type; 0 where that is not known."""
        if not self.num_parameters or self.num_trainable is None or self.parameter_bytes is None:
            return 0
        return self.parameter_bytes * self.num_trainable // self.num_parameters


@dataclass(frozen=True, kw_only=True)
class Inspection(Record):
    """What the search knows before its first probe.

    Attributes:
        baseline: the user's baseline, completed; `baseline_given`: whether the task states one with its batch size.
        baseline_alone: what the user would run on one device, completed; None in a world of one process, and where it is not known.
        batch: which micro batches and accumulation steps may be searched.
        support: for each technique, what may be searched.
        outside_bytes: what a process held before the model was built, on the scale of a probe's peak: libraries, the
            user's module, a CUDA context.
        communicators: what it holds beside that once it trains together with others.
        step_s: seconds of the inspection's training step, the first of its process; None where none was taken.
        step_samples: samples of that step: two, or the baseline's batch where a step of two samples fails.
        shortage: how that step ran out of memory; empty where it did not.
        comparable: whether a config's gradients can be compared with plain fp32's.
        coupling: whether micro batches give the gradient of the whole batch; None where that was not looked into.
        built_for_real: why a prediction, which needs no values, had to build the model with them; else empty.
        global_batch: samples per optimizer step of all processes of the world together; None where any number will do.
        world: the processes that train together; None while it is unknown how many a command starts.
        signature: the model's signature; None where the model is not seen.
    """

    facts: TaskFacts
    device: DeviceInfo
    global_batch: int | None
    baseline: dict[str, Choice]
    baseline_given: bool
    batch: BatchSupport
    support: dict[str, Support]
    outside_bytes: int
    communicators: Communicators = NO_COMMUNICATORS
    step_s: float | None = None
    step_samples: int = STEP_SAMPLES
    shortage: str = ""
    comparable: bool = True
    coupling: Coupling | None = None
    built_for_real: str = ""
    world: World | None = field(default_factory=World)
    baseline_alone: dict[str, Choice] | None = None
    signature: ModelSignature | None = None

    @property
    def known_world(self) -> World:
        """The world; a single process while it is unknown."""
        return self.world or ALONE

    @property
    def keeps_baseline_batch(self) -> bool:
        """Whether the baseline's batch is not halved to make it fit: the user gave it, or a step takes all of the global batch at once."""
        return self.baseline_given or (len(self.batch.sizes) == 1 and not self.batch.optional_sizes)

    @property
    def devices(self) -> str:
        """The devices that train together, in words."""
        number = f"{self.known_world.size} x " if self.known_world.size > 1 else ""
        return f"{number}{self.device.model}"

    @property
    def sample_s(self) -> float | None:
        """Seconds per sample of the inspection's step."""
        return None if self.step_s is None else self.step_s / self.step_samples

    def support_of(self, name: str) -> Support:
        """What may be searched for any key of a config, a technique's or the batch's.

        Raises:
            KeyError: `name` is no such key.
        """
        batch = self.batch
        if name == BATCH_SIZE:
            return Support(choices=batch.sizes, optional=batch.optional_sizes, reason=batch.sizes_reason)
        if name == ACCUMULATION:
            return Support(
                choices=batch.accumulation_steps,
                optional=batch.optional_accumulation_steps,
                reason=batch.reason,
                note=batch.note,
            )
        return self.support[name]

    @property
    def unsupported(self) -> dict[str, str]:
        """Keys with only one choice, or with choices that must be asked for -> the reason."""
        found = {name: self.support_of(name) for name in (*BATCH_KEYS, *self.support)}
        return {n: s.reason for n, s in found.items() if s.reason and (len(s.choices) < 2 or s.optional)}
