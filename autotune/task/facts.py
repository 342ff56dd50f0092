"""Builds a task once to gather its facts, and to find out whether it can be trained at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.errors import TaskError, first_line
from autotune.records.inspection import TaskFacts, optimizer_name
from autotune.task import adapters, handed_over, samples
from autotune.task.batches import CannotCutError, num_bytes, tensors, to_device
from autotune.task.model_file import CONSTANTS, SIGNATURES
from autotune.task.source import source_hash
from autotune.task.task import Task
from autotune.task.usercode import describe, element_type, is_allocation_failure, shape, user_code

NUM_COUNTED = 32  # samples whose tokens are counted


def gather_facts(task: Task) -> TaskFacts:
    """Build the task's model, optimizer and dataset, on the CPU, and describe them.

    Raises:
        TaskError: one of them is not valid, or the user's code raised.
    """
    with user_code("your build_model"):
        model = task.model()
    with user_code("your configure_optimizers"):
        optimizer, num_schedulers = task.optimizer_and_schedulers(model)
    with user_code("your train_dataset"):
        dataset = task.dataset()
    warnings = [*task.warnings, *(task.origin.warnings if task.origin else ())]
    eval_set = None
    try:
        with user_code("your eval_dataset" if task.eval_dataset else "your val_dataloader"):
            eval_set = task.evaluation_set()
    except TaskError as error:
        if task.eval_dataset:
            raise
        warnings.append(f"the module is not validated: {first_line(error)}")  # training does not need it
    eval_set = dataset if eval_set is None else eval_set
    with user_code("reading samples of your train_dataset"):
        widest = task.widest()
    parameters = list(model.parameters())
    if task.takes_whole_steps:
        step = "train_step" if task.train_step else f"the manual optimization of {type(model).__name__}"
        warnings.append(
            f"{step} is one unit: only techniques that do not reach into it are searched, its memory is learned from probes, "
            "and gradients are not compared with plain fp32"
        )
    if num_schedulers:
        warnings.append(
            "configure_optimizers also returned a learning-rate scheduler; autotune does not step it: it changes "
            "neither speed nor memory"
        )
    if left_out := adapters.hooks_left_out(model):
        warnings.append(
            f"autotune does not call {' and '.join(left_out)} of {type(model).__name__}: measurements are without it"
        )
    return TaskFacts(
        name=task.name,
        source_hash=source_hash(task),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(map(num_bytes, (*parameters, *model.buffers()))),
        optimizer=optimizer_name(type(optimizer)) if isinstance(optimizer, torch.optim.Optimizer) else "",
        dataset_size=task.dataset_size(),
        has_batchnorm=uses_batch_statistics(model),
        global_batch=task.global_batch,
        baseline=None if task.baseline is None else dict(task.baseline),
        batch=_shapes(task),
        widest=widest,
        tokens_per_sample=_tokens_per_sample(task),
        evaluates=bool(task.eval),
        eval_samples=None if eval_set is None else samples.dataset_size(eval_set),
        parts=(
            *(name for name in (*SIGNATURES, *CONSTANTS) if getattr(task, name.lower()) is not None),
            *(["LightningModule"] if adapters.is_lightning(model) else []),
            *(["PreTrainedModel"] if any(map(adapters.is_pretrained, model.modules())) else []),
            *(["IterableDataset"] if samples.is_stream(dataset) else []),
        ),
        warnings=tuple(warnings),
    )


def uses_batch_statistics(model: torch.nn.Module) -> bool:
    """Whether any module normalises over the samples of a micro batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def _shapes(task: Task) -> tuple[str, ...]:
    """Types and shapes of a small batch that is the same each time; empty if the user's code cannot provide one."""

    def found() -> tuple[str, ...]:
        return tuple(f"{element_type(tensor)} {shape(tensor)}" for tensor in tensors(task.small_batch(2)))

    with contextlib.suppress(Exception):  # `check_task` says what is wrong with a batch
        shapes = found()
        return shapes if shapes == found() else ()
    return ()


def _tokens_per_sample(task: Task) -> float | None:
    if task.loss_weight is not None:
        dataset = task.dataset()
        most = None if dataset is None else samples.dataset_size(dataset)
        num_samples = min(NUM_COUNTED, most or NUM_COUNTED)
        with contextlib.suppress(Exception):  # `check_task` says what is wrong with a batch
            terms = task.weight(task.small_batch(num_samples), num_samples) / num_samples
            return terms if terms > 1 else None  # one label per sample is not a token
    return None


def check_task(task: Task, device: torch.device, batch_size: int = 2) -> float:
    """Build everything once and take one training step of a few samples on `device`, with a model that nothing else uses.

    A failed allocation is raised unchanged, for the caller to classify. One in the optimizer's step alone is ignored,
    since other configs may have room for it.

    Returns:
        Seconds of the training step.

    Raises:
        TaskError: the task is not valid, or the user's code raised (with its frames).
    """
    with user_code("your build_model"):
        model = task.model()
    with user_code(
        f"moving the model to {device}", f"make sure that {device} can hold it and that every module can be moved"
    ):
        model = model.to(device)
    with user_code("your configure_optimizers"):
        optimizer = task.optimizer(model)
    with user_code("your train_dataset"):
        task.dataset()
    if task.checkpoint_blocks is not None:
        with user_code("your checkpoint_blocks"):
            _check_blocks(model, task.checkpoint_blocks(model))
    batch = _batch(task, batch_size)
    started = time.perf_counter()
    if task.takes_whole_steps:
        _check_whole_step(task, model, optimizer, batch, device)
        return time.perf_counter() - started
    with user_code("your loss_weight" if task.loss_weight else "counting the samples of a batch"):
        weight = task.weight(batch, batch_size)
    if not weight > 0:
        raise TaskError(
            f"the loss of a batch of {batch_size} samples averages over {weight:g} terms; expected more than 0: "
            + ("correct loss_weight(batch)" if task.loss_weight else "make_batch gives no label that counts")
        )
    _check_gradients(task, model, batch, device)
    _check_update(task, model, optimizer)
    taken_s = time.perf_counter() - started
    if task.eval_step is not None:
        with user_code("your eval_step"), handed_over.telling_of_gpus(), torch.inference_mode():
            task.evaluate(model.eval(), to_device(_batch(task, batch_size), device))
    return taken_s


def _batch(task: Task, batch_size: int) -> Any:
    if task.make_batch is None:
        advice = "give a collate_fn(samples) that makes one batch of samples of unequal size, or correct it there"
        with user_code(f"making a batch of {batch_size} samples of your train_dataset", advice):
            return task.batch(batch_size)
    for size in (batch_size + 1, batch_size) if batch_size == 2 else (batch_size,):
        with user_code(f"your make_batch({size})"):
            batch = task.batch(size)
    with contextlib.suppress(CannotCutError):
        if task.cuts() is None:  # nothing in it depends on its size
            raise TaskError(
                f"make_batch ignores its size: for two sizes it returned {describe(batch)}; make the first dimension of "
                "every tensor its argument, batch_size"
            )
    return batch


def _check_gradients(task: Task, model: torch.nn.Module, batch: Any, device: torch.device) -> None:
    what = (
        "your training_step"
        if task.training_step
        else f"the forward pass of {type(model).__name__} on {describe(batch)}"
    )
    moved = to_device(batch, device)
    advice = "correct it there, or what make_batch or train_dataset gives it, and run again"
    with user_code(what, advice), handed_over.telling_of_gpus():
        loss = task.loss(model, moved)
    with user_code(
        "the backward pass of the loss", "look for tensors changed in place or a graph used twice, and run again"
    ):
        torch.autograd.backward(loss)
    if all(parameter.grad is None for parameter in model.parameters()):
        raise TaskError(
            f"no parameter of {type(model).__name__} has a gradient after the backward pass; expected a loss that "
            "depends on the model given to training_step: use its argument `model`, not another one"
        )


def _check_whole_step(task: Task, model: torch.nn.Module, optimizers: Any, batch: Any, device: torch.device) -> None:
    before = [parameter._version for parameter in model.parameters()]
    advice = "correct it there, or what make_batch or train_dataset gives it, and run again"
    # the step may clear its gradients, and update `parameter.data`, whose version nobody counts
    with user_code("your own step", advice), handed_over.telling_of_gpus(), _gradients(model) as arrived:
        task.whole_step(model, optimizers, to_device(batch, device))
    after = [parameter._version for parameter in model.parameters()]
    if before == after and not arrived and all(parameter.grad is None for parameter in model.parameters()):
        raise TaskError(
            f"the step left every parameter of {type(model).__name__} as it was, and without a gradient; expected it to "
            "call backward() and the optimizers' step() itself: a function that only returns the loss is training_step"
        )


@contextlib.contextmanager
def _gradients(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The parameters to which gradients are added meanwhile."""
    arrived: list[torch.Tensor] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(arrived.append) for parameter in trained]
    try:
        yield arrived
    finally:
        for hook in hooks:
            hook.remove()


def _check_update(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    advice = (
        "return an optimizer from configure_optimizers(model) whose step() takes this model's gradients and needs no "
        f"closure, such as torch.optim.SGD; or {adapters.WHOLE_STEP}"
    )
    try:
        if task.max_grad_norm is not None:
            leave_out = "leave max_grad_norm (MAX_GRAD_NORM in a model file) out and run again"
            with user_code(f"clipping the gradients to {task.max_grad_norm}", leave_out):
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_grad_norm)
        with user_code(f"a step of {type(optimizer).__name__}", advice):
            optimizer.step()
    except Exception as error:
        if not is_allocation_failure(error):  # whether memory suffices is for the probes to find, config by config
            raise


def _check_blocks(model: torch.nn.Module, blocks: Any) -> None:
    inside = {id(module) for module in model.modules()}
    is_list = isinstance(blocks, list | tuple | torch.nn.ModuleList | torch.nn.Sequential)
    if not is_list or not len(blocks) or not all(id(block) in inside for block in blocks):
        raise TaskError(
            f"checkpoint_blocks returned {describe(blocks)}; expected a non-empty list of modules of the model it was "
            "given, for example `return list(model.blocks)`"
        )
