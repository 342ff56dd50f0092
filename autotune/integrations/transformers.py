"""Hugging Face's Trainer: `tune(trainer)` returns the `TrainingArguments` that train fastest, `AutotuneCallback` trains with them.

```python
trainer = Trainer(model=model, args=args, train_dataset=dataset)
args = autotune.integrations.transformers.tune(trainer, budget="2m")
Trainer(model=model, args=args, train_dataset=dataset).train()
```
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from transformers import Trainer, TrainerCallback
from transformers.utils import is_torch_tf32_available

from autotune.devices import TYPES, capabilities_of
from autotune.errors import ConfigError, TaskError, in_one_line
from autotune.export.transformers import said_of_tf32
from autotune.group import launched_world
from autotune.integrations.accelerator import choices_of_shards, groups_of, require_whole_samples
from autotune.integrations.base import (
    LiveModel,
    batch_of_all,
    name_of,
    plain,
    read,
    search,
    set_to_train,
    techniques_saying,
    words_of_changes,
)
from autotune.randomness import keep_randomness
from autotune.records.config import ACCUMULATION, BATCH_SIZE
from autotune.task import Task
from autotune.task.held import held_by
from autotune.task.process_settings import apply_settings, own_settings, read_settings
from autotune.techniques import find_techniques
from autotune.techniques.frameworks import TRANSFORMERS
from autotune.tuning.events import Listener

_GIVEN = ("data_collator", "train_dataset", "processing_class", "compute_loss_func", "optimizer_cls_and_kwargs")
# What is no matter of training steps, or would act on them beside what a config says.
_IN_PROBES: dict[str, Any] = {
    "report_to": "none", "push_to_hub": False, "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "no",
    "load_best_model_at_end": False, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "bf16_full_eval": False,
    "fp16_full_eval": False, "eval_on_start": False, "torch_compile_backend": None, "torch_compile_mode": None,
    "activation_checkpointing": False, "auto_find_batch_size": False, "fsdp": "", "fsdp_config": None,
}  # fmt: skip
_PLAIN_OPTIMIZERS = {"AdamW": "adamw_torch"}  # class in torch.optim -> `optim` without any technique
_DEVICE = (
    "_setup_devices",
    "__cached__setup_devices",
)  # where arguments keep their device; the second before version 5
# settings of the process that the arguments' `tf32` changes beside those of matrix products
_OF_CONVOLUTIONS = ("cudnn.allow_tf32", "cudnn.conv.", "cudnn.rnn.", "mkldnn.conv.", "mkldnn.rnn.")
_LOOPS = ("train", "_inner_training_loop")
_COMPILER = "inductor"  # the backend by which probes compile
_FULL = "highest"  # precision of fp32 matrix products
_ROUNDING = 0.01  # of a loss that is computed twice


def tune(trainer: Trainer, *, listeners: Sequence[Listener] | None = None, **options: Any) -> Any:
    """Find the `TrainingArguments` that train `trainer`'s model fastest on this machine. The global batch is kept.

    Searched is what `TrainingArguments` can say. Each probe makes a trainer of the same class, with the same data, collator,
    loss and optimizer, on a copy of the model. Nothing of `trainer` changes. Accelerate's state is made anew with the new
    arguments, as with any: make a new Trainer of them.

    Args:
        trainer: as it stands before `train()`; its arguments are the baseline.
        listeners: watch the search; by default its progress goes to stderr.
        **options: of `autotune.search`, such as `budget` and `include`.

    Returns:
        A copy of `trainer.args`, changed only where the answer says so.

    Raises:
        TaskError: this trainer cannot be tuned, with the reason.
        AutotuneError: as `autotune.search` does.
    """
    task = task_of(trainer)
    if _own_optimizer(trainer):  # which `optim` does not choose
        said_of_others = [technique.name for technique in find_techniques().values() if technique.said_of]
        options["exclude"] = (*options.get("exclude", ()), *said_of_others)
    if _shards(trainer):  # which is given the precision
        options["exclude"] = (*options.get("exclude", ()), *techniques_saying(TRANSFORMERS, "bf16"))
    result = search(task, (TRANSFORMERS,), options, listeners, device=name_of(trainer.args.device))
    said = words_of_changes(task, result, (TRANSFORMERS,))
    return _with_answer(trainer.args, said[TRANSFORMERS])


def task_of(trainer: Trainer) -> Task:
    """What a trainer trains, as a task.

    Raises:
        TaskError: it cannot be tuned, with the reason and what to do.
    """
    args = trainer.args
    _refuse(trainer)
    given = _given(trainer)
    _refuse_compiler(given, type(trainer).__name__)
    live = LiveTrainer(trainer, _in_probes(given))
    task = Task(
        build_model=live.model.build_model,
        training_step=live.training_step,
        loss_weight=live.loss_weight if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func else None,
        configure_optimizers=live.configure_optimizers,
        train_dataset=live.train_dataset,
        collate_fn=live.collate_fn,
        max_grad_norm=args.max_grad_norm or None,
        global_batch=batch_of_all(args.per_device_train_batch_size * args.gradient_accumulation_steps),
        name=type(trainer.model).__name__,
        fixed_accumulation=live.why_accumulation_is_fixed,
        warnings=tuple(_left_out(trainer)),
        made_by=f"{__name__}.task_of(trainer)",
        settings=_without_tf32() if _switch_tf32_on(args) else {},
    )
    baseline = read(TRANSFORMERS, given, task, trainer.model)
    plan = {BATCH_SIZE: args.per_device_train_batch_size, ACCUMULATION: args.gradient_accumulation_steps}
    if _shards(trainer):
        state = trainer.accelerator.state
        precision = {"mixed_precision": state.mixed_precision}
        baseline |= choices_of_shards(state.fsdp_plugin, precision, groups_of(state))
    return replace(task, baseline={**baseline, **plan})


def _shards(trainer: Trainer) -> bool:
    """Whether it shards over several processes."""
    return bool(trainer.is_fsdp_enabled) and launched_world().size > 1


class LiveTrainer:
    """A user's trainer, of which the process of a probe makes one of its own.

    Args:
        in_probes: arguments there, in place of the user's.
    """

    def __init__(self, trainer: Any, in_probes: Mapping[str, Any]) -> None:
        args = trainer.args
        self.model = LiveModel(trainer.model, trainer.optimizer if _own_optimizer(trainer) else None)
        self._has_optimizer = _own_optimizer(trainer)
        self._class, self._class_of_args = type(trainer), type(args)
        self._args = {item.name: getattr(args, item.name) for item in fields(args) if item.init}
        self._args |= {name: value for name, value in in_probes.items() if name in self._args}
        self._given = {name: getattr(trainer, name) for name in _GIVEN}
        made_anew = {"train", *_names_in(Trainer.__init__), *_names_in(Trainer.create_accelerator_and_postprocess)}
        self._own = {name: value for name, value in vars(trainer).items() if name not in made_anew}
        # which trainers of TRL set once they are made
        self._own["model_accepts_loss_kwargs"] = trainer.model_accepts_loss_kwargs
        self._made: Any = None
        self._loader: Any = None

    def task_identity(self) -> str:
        """What distinguishes this trainer from others in the same script."""
        optimizer = "" if self._has_optimizer else f"{self._args['optim']} {self._args['optim_args']}"
        alike: Any = object.__new__(self._class)  # of which the attributes count where the class is the user's
        vars(alike).update({name: value for name, value in self._own.items() if not name.startswith("_")})
        losses = (self._given["compute_loss_func"], self._class.compute_loss, self._class.training_step)
        return f"{self._class.__qualname__} {optimizer} {held_by(*losses, alike, *self._given.values())}"

    def training_step(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss as the trainer's class computes it."""
        trainer = self._trainer(model)
        inputs = trainer._prepare_inputs({**batch} if isinstance(batch, Mapping) else batch)
        num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        if self._class.training_step is Trainer.training_step:
            return trainer.compute_loss(model, inputs, num_items_in_batch=num_items)  # type: ignore[no-any-return]
        losses: list[torch.Tensor] = []
        trainer.accelerator.backward = lambda loss, **_: losses.append(loss)
        trainer.current_gradient_accumulation_steps = 1
        trainer.training_step(model, inputs, num_items)
        if len(losses) != 1:
            raise TaskError(
                f"training_step of {self._class.__name__} calls backward {len(losses)} times; expected once, as "
                "Trainer's own does: compute one loss in compute_loss, or write the loop as train_step in a model file"
            )
        return losses[0]

    def loss_weight(self, batch: Any) -> float:
        """How many labels the mean loss of a micro batch is over."""
        num_items = self._trainer()._get_num_items_in_batch([batch], torch.device("cpu"))
        if num_items is not None:
            return float(num_items)
        return float(len(next(iter(batch.values()))))

    def configure_optimizers(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer given to the trainer, or the one that it creates."""
        if self._has_optimizer:
            return self.model.configure_optimizers(model)
        trainer = self._trainer(model)
        trainer.optimizer = None
        return set_to_train(trainer.create_optimizer())

    def why_accumulation_is_fixed(self, model: torch.nn.Module, batch: Any) -> str:
        """Why more or fewer accumulation steps would scale the gradients; empty where they would not."""
        return _why_scaled(self._trainer(model), model, batch)

    def train_dataset(self) -> Any:
        """The dataset as the trainer's loader reads it."""
        return self._train_loader().dataset

    def collate_fn(self, samples: list[Any]) -> Any:
        """Make a batch as the trainer's loader does."""
        return self._train_loader().collate_fn(samples)

    def _train_loader(self) -> Any:
        if self._loader is None:
            self._loader = self._trainer().get_train_dataloader()
        return self._loader

    def _trainer(self, model: torch.nn.Module | None = None) -> Any:
        """The trainer of this process, which trains `model` from now on."""
        if self._made is None:
            with keep_randomness():
                on_gpu = torch.cuda.is_available()
                with mock.patch.object(torch.cuda, "set_device"):  # they take the first of all GPUs that they see
                    args = self._class_of_args(**{**self._args, "use_cpu": not on_gpu})
                if on_gpu:
                    vars(args).update(
                        dict.fromkeys(_DEVICE, torch.device("cuda", torch.cuda.current_device())), _n_gpu=1
                    )
                made: Any = object.__new__(self._class)
                made._move_model_to_device = lambda *_: None
                Trainer.__init__(made, model=self.model.model, args=args, **self._given)
            vars(made).update(self._own)
            self._made = made
        if model is not None:
            self._made.model = self._made.model_wrapped = model
        return self._made


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]
    """Tunes a trainer when its `train()` is called, before training begins: `Trainer(..., callbacks=[AutotuneCallback()])`.

    Args:
        listeners: as in `tune`.
        **options: as in `tune`.
    """

    def __init__(self, *, listeners: Sequence[Listener] | None = None, **options: Any) -> None:
        self._listeners, self._options = listeners, options
        self._taken_over = WeakSet[Trainer]()  # one callback may be given to several

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the trainer's `train` over, once: by `on_train_begin` its loader and its optimizer are there already."""
        trainer = _calling_trainer()
        trainer.train = partial(self._train, trainer)
        self._taken_over.add(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to be of no use: a callback that is added to a trainer is not called before training begins.

        Raises:
            ConfigError: it was added by `add_callback`.
        """
        if _calling_trainer() not in self._taken_over:
            raise ConfigError(
                "AutotuneCallback was added to a Trainer that was made already, so it could not tune it before training began; give it as "
                "Trainer(..., callbacks=[AutotuneCallback()])"
            )

    def _train(self, trainer: Any, *given: Any, **named: Any) -> Any:
        del trainer.train
        args = tune(trainer, listeners=self._listeners, **self._options)
        trainer.args = args
        trainer.create_accelerator_and_postprocess()
        trainer._train_batch_size = args.train_batch_size
        return trainer.train(*given, **named)


def _calling_trainer() -> Any:
    """The trainer that calls its callbacks, to which it does not hand itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    raise ConfigError(
        "AutotuneCallback was called by no Trainer; give it as Trainer(..., callbacks=[AutotuneCallback()])"
    )


def _refuse(trainer: Trainer) -> None:
    args, name = trainer.args, type(trainer).__name__
    if trainer.train_dataset is None and type(trainer).get_train_dataloader is Trainer.get_train_dataloader:
        raise TaskError(f"the {name} has no train_dataset; give it the dataset that it is to train on")
    if trainer.is_deepspeed_enabled or args.deepspeed:
        raise TaskError(
            f"the {name} trains with DeepSpeed, which probes do not; tune it without first, or with FSDP, and add DeepSpeed to the "
            "arguments that come back"
        )
    _refuse_in_a_world(trainer)
    if args.device.type not in TYPES:
        raise TaskError(
            f"the trainer's device is {args.device}; expected a CPU or an NVIDIA GPU: TrainingArguments(use_cpu=True)"
        )
    if args.n_gpu > 1:
        raise TaskError(f"the {name} spreads batches over {args.n_gpu} GPUs; start with CUDA_VISIBLE_DEVICES=0")
    if getattr(trainer.accelerator, "mixed_precision", "no") not in ("no", "bf16", "fp16"):
        raise TaskError(
            f"the {name} trains in {trainer.accelerator.mixed_precision}; expected fp32, bf16 or fp16: bf16=True while you tune"
        )
    for loop in _LOOPS:
        if getattr(type(trainer), loop) is not getattr(Trainer, loop):
            raise TaskError(
                f"{name} has a {loop} of its own, whose steps autotune does not know; write them as train_step(model, "
                "optimizers, batch) in a model file, or tune a plain Trainer of the same model"
            )


def _refuse_in_a_world(trainer: Trainer) -> None:
    args, name, size = trainer.args, type(trainer).__name__, launched_world().size
    if args.world_size != size:
        raise TaskError(
            f"{size} processes were launched, and the {name} of each trains among {args.world_size}; start the script with torchrun or "
            "accelerate launch, by which they train together, or unset WORLD_SIZE and tune in one process after the other"
        )
    require_whole_samples(groups_of(trainer.accelerator.state))
    if size > 1 and trainer.accelerator.split_batches:
        whole = args.per_device_train_batch_size
        raise TaskError(
            f"the {name} divides per_device_train_batch_size={whole} by its {size} processes (split_batches); leave split_batches out of "
            f"accelerator_config and set per_device_train_batch_size={max(whole // size, 1)}, which trains the same"
        )


def _given(trainer: Trainer) -> dict[str, Any]:
    """The trainer's arguments as they take effect."""
    given = {item.name: getattr(trainer.args, item.name) for item in fields(trainer.args)}
    precision = trainer.accelerator.mixed_precision  # Accelerate's own configuration may set it
    given |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    given["tf32"] = _switch_tf32_on(trainer.args)
    if given["torch_compile"] and given["torch_compile_mode"] is None:
        given["torch_compile_mode"] = "default"  # as Accelerate takes it
    page_locked = capabilities_of(trainer.args.device.type).page_locked
    return given | {"dataloader_pin_memory": page_locked and trainer.args.dataloader_pin_memory}


def _refuse_compiler(given: Mapping[str, Any], name: str) -> None:
    """Refuse to take what probes do not compile by for training without a compiler."""
    if not given["torch_compile"]:
        return
    if given["torch_compile_backend"] != _COMPILER:
        raise TaskError(
            f"the {name} compiles by torch_compile_backend={given['torch_compile_backend']!r}, which probes do not; expected "
            f"{_COMPILER!r}: leave torch_compile_backend out, or set torch_compile=False while you tune"
        )
    techniques = find_techniques()
    for technique in (techniques[each] for each in techniques_saying(TRANSFORMERS, "torch_compile")):
        if technique.read(TRANSFORMERS, given) is None:
            modes = ", ".join(repr(choice) for choice in technique.choices if choice != technique.off)
            raise TaskError(
                f"the {name} compiles by torch_compile_mode={given['torch_compile_mode']!r}, which probes do not; expected one of "
                f"{modes}: set one of them, or torch_compile=False while you tune"
            )


def _in_probes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a trainer whose techniques the session applies."""
    said = {**plain(TRANSFORMERS), **_IN_PROBES}
    for technique in find_techniques().values():
        if technique.said_of and technique.read(TRANSFORMERS, given) not in (None, technique.off):
            said["optim"] = _PLAIN_OPTIMIZERS[technique.said_of]
    return said


def _switch_tf32_on(args: Any) -> bool:
    """Whether making these arguments switched TF32 on for the whole process: where they ask for it, and unasked where they compile.

    Not where the script has set the precision of matrix products itself, by `set_float32_matmul_precision`: the arguments change
    nothing about that. This is known only where transformers uses the switch for all operators, of torch 2.9 and later; before, the
    arguments set the same as the script, and are taken for those who did.
    """
    unasked = args.tf32 is None and args.torch_compile and not args.fp16
    asks = bool(args.tf32) or (unasked and is_torch_tf32_available())
    for_all = getattr(torch.backends, "fp32_precision", "none") == "tf32"
    own = for_all and own_settings().get("float32_matmul_precision", _FULL) != _FULL
    return asks and not own


def _without_tf32() -> dict[str, str]:
    """What is set where matrix products are to be in full precision. Convolutions stay as they are."""
    by_operator = ("cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision")  # torch 2.9 and later
    known = by_operator if hasattr(torch.backends.cuda.matmul, "fp32_precision") else ()
    return {"float32_matmul_precision": _FULL, **dict.fromkeys(known, "ieee")}


def _with_answer(args: Any, said: Mapping[str, Any]) -> Any:
    """A copy of `args` with the answer under all the names that it has there, and no other change.

    `tf32` of arguments is about convolutions, too, and probes leave these as the process has them; so does this call, in this process.
    """
    changed = dict(said)
    for name, value in said.items():
        newer = name.replace("gradient_checkpointing", "activation_checkpointing")
        if newer != name and hasattr(args, newer):
            changed[newer] = value
    is_on = _switch_tf32_on(args)
    wanted = bool(said["tf32"]) if "tf32" in said else is_on
    told = {"torch_compile": args.torch_compile, "fp16": args.fp16, **said}
    changed |= said_of_tf32(told, wanted=wanted, is_on=is_on)
    if changed.get("torch_compile") is False:
        changed |= {"torch_compile_backend": None, "torch_compile_mode": None}
    before = read_settings()
    made = _made_anew(args, changed)
    apply_settings({name: value for name, value in before.items() if name.startswith(_OF_CONVOLUTIONS)})
    return made


def _made_anew(args: Any, changed: Mapping[str, Any]) -> Any:
    if capabilities_of(args.device.type).own_processors:
        return replace(args, **changed)
    made = replace(args, **changed, use_cpu=True)  # without it they refuse a short type where there is no GPU,
    made.use_cpu = args.use_cpu  # and with it they would not train on a GPU where they are taken to one
    made.dataloader_pin_memory = changed.get("dataloader_pin_memory", args.dataloader_pin_memory)
    return made


def _left_out(trainer: Trainer) -> list[str]:
    """What the user should know about the probes of this trainer."""
    args, name, found = trainer.args, type(trainer).__name__, []
    if type(trainer).training_step is not Trainer.training_step:
        found.append(f"probes measure {name}.training_step without what follows its backward pass")
    if args.neftune_noise_alpha is not None:
        found.append("probes add no NEFTune noise to embeddings")
    handler = trainer.accelerator.ddp_handler
    if launched_world().size > 1 and not _shards(trainer) and handler is not None and handler.find_unused_parameters:
        found.append(
            "DDP looks for unused parameters in each step of the Trainer, and in probes only where the loss leaves some out; "
            "ddp_find_unused_parameters=False spares it the work where it leaves none"
        )
    if getattr(args, "use_liger_kernel", False):
        found.append("probes run without Liger's kernels, which Trainer puts in when it trains")
    return found


def _why_scaled(trainer: Any, model: Any, batch: Any) -> str:
    """Why more or fewer accumulation steps would scale the gradients; empty where they would not."""
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)  # not there in older versions
    if declared is not None or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
        return ""  # the user says how it is, or Trainer divides the loss by the accumulation steps
    overridden = type(trainer).compute_loss is not Trainer.compute_loss
    if overridden or trainer.compute_loss_func:
        loss = f"{type(trainer).__name__}.compute_loss" if overridden else "compute_loss_func"
        return _why_own_loss_scales(trainer, model, batch, loss)
    base, place = model, "model"
    if hasattr(model, "get_base_model"):  # of PEFT, which Trainer looks into, too
        base, place = model.get_base_model(), "model.get_base_model()"
    if trainer.label_smoother or _counts_items(base):
        return ""
    return _adds_up_means(
        f"the loss of {type(base).__name__}", f"set {place}.accepts_loss_kwargs = False before the Trainer is made"
    )


def _why_own_loss_scales(trainer: Any, model: torch.nn.Module, batch: Any, loss: str) -> str:
    """As `_why_scaled`, of a loss whose code may be anything: it is computed as in the batch's own step, and as among twice its labels."""
    try:
        inputs = trainer._prepare_inputs({**batch})
        num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        if num_items is None and not trainer.compute_loss_func:
            return ""  # Trainer divides it
        once, among_twice = (_loss_among(trainer, model, inputs, number) for number in (num_items, 2 * num_items))
    except Exception as error:
        return (
            f"whether {loss} divides by num_items_in_batch could not be measured ({in_one_line(error)}), and unless it does, another "
            f"number of micro batches scales the gradients; where you know that it does, include {ACCUMULATION!r} in the search"
        )
    if abs(2 * among_twice - once) < _ROUNDING * abs(once):
        return ""
    remedy = "divide the sum of its terms by num_items_in_batch"
    if hasattr(Trainer, "loss_is_scaled_for_ga"):
        remedy = f"set loss_is_scaled_for_ga = False on {type(trainer).__name__}"
    return _adds_up_means(loss, remedy)


def _loss_among(trainer: Any, model: torch.nn.Module, inputs: Mapping[str, Any], num_items: Any) -> float:
    """The loss of a micro batch in a step of `num_items` labels, with the same random numbers in each call."""
    with keep_randomness(), torch.no_grad():
        return float(trainer.compute_loss(model, {**inputs}, num_items_in_batch=num_items))


def _adds_up_means(loss: str, remedy: str) -> str:
    return (
        f"{loss} ignores num_items_in_batch, so Trainer adds up the means of its micro batches, and another number of them scales the "
        f"gradients; to have their mean, and other numbers tried, {remedy}"
    )


def _counts_items(model: torch.nn.Module) -> bool:
    """Whether a model's own loss is a mean over the labels of the whole step, as Trainer takes it to be."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    named = () if code is None else (*code.co_names, *code.co_varnames)
    wraps = code is None or not {"labels"} & {*named}  # another module's forward
    return wraps or not {"loss_function", "num_items_in_batch"}.isdisjoint(named)


def _own_optimizer(trainer: Trainer) -> bool:
    """Whether the user gave the trainer an optimizer; an earlier `train()` leaves Accelerate's."""
    return trainer.optimizer is not None and not type(trainer.optimizer).__module__.startswith("accelerate.")


def _names_in(function: Any) -> tuple[str, ...]:
    """The attributes that a method sets or reads."""
    return inspect.unwrap(function).__code__.co_names  # type: ignore[no-any-return]
