"""`prepare(task, config)`: the one implementation of the training step, for probes and users alike."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from autotune.alarm import Alarm
from autotune.devices import Device, open_device
from autotune.errors import ConfigError, TaskError
from autotune.evaluator import Evaluator
from autotune.group import Together, join, launched_device, launched_world, require_own_device, sum_over
from autotune.randomness import seed_everything
from autotune.records.config import Choice, Config, World
from autotune.recovery import HALVE, RAISE, Recovery
from autotune.shares import own_samples
from autotune.step_loader import StepLoader, micro_loader, one_by_one, without_sampler
from autotune.task import Task, load_task
from autotune.task.adapters import begin_counting, count_step, numbered
from autotune.task.batches import CannotCutError, StepBatch, split, to_device
from autotune.task.losses import WithTerms, shares_of
from autotune.task.process_settings import (
    apply_settings,
    as_script_has_them,
    end_switches,
    read_settings,
    switching,
)
from autotune.techniques import REACHES_INTO_STEP, Phase, Techniques, UnsupportedError, find_techniques
from autotune.techniques.build import Build, Spread
from autotune.techniques.tensors.spread import copies_of, start_equal

_LOG = logging.getLogger("autotune")
_FLAGS = ("foreach", "fused", "capturable", "differentiable")  # of a group of parameters: how it is updated


class Session:
    """A task made ready to train with a config.

    Attributes:
        model: the model on its device, in training mode; where the world shards parameters, with this process's shards.
        optimizer: the task's own, stepping as the config says; for a `train_step` all that the task configures.
        loader: yields one `StepBatch` per optimizer step: the dataset once, shuffled, or `make_batch` without end. In a world of
            several processes it is this one's part of the step, and its share of the dataset. A last micro batch of one sample is left
            out where the model takes batch statistics.
        config: the config that was applied.
        device: the torch device.
        world: the processes that train the model together, this one among them.
        scaler: GradScaler for fp16, else None.
        evaluator: evaluates single batches; `evaluate` takes a whole loader.
        ready: what a forward pass is given and runs in, as the config says.
        places: technique -> the modules of the model that it acts on, as in `Build`.
        own_loss: this process's part of the latest loss, times the number of processes; None where there is one process.
    """

    def __init__(self, build: Build, recovery: Recovery | None = None, alarm: Alarm | None = None) -> None:
        self.task = build.task
        self.config = build.config
        self.device = build.device.torch_device
        self.world = build.world
        self.model = build.model
        begin_counting(build.model, build.config.accumulation_steps)
        self.optimizer = build.optimizer
        self.scaler = build.scaler
        self.places = build.places
        self._spread, self._together = build.spread, Together(build.world, self.device)
        self._shared = nullcontext if alarm is None else alarm.shared
        self.loader = StepLoader(build, self._shared)
        self.ready = Ready(build)
        self._one_micro_batch = build.one_micro_batch
        self._loader_options = build.loader_options
        self._recovery = recovery
        self.evaluator = Evaluator(build, self.ready, halves=recovery is not None)
        self.own_loss: torch.Tensor | None = None
        self._position = 0  # of the micro batch that `accumulate` has come to
        self._with_terms = WithTerms()

    def step(self, batch: Any) -> torch.Tensor:
        """Take one optimizer step on all the samples of `batch`.

        Where memory runs out, the step is taken again in smaller micro batches (`prepare`'s `on_oom`). It is then the step
        that a session with those micro batches takes from the same parameters, buffers and random state; but a LightningModule is
        told for each the number of the batch that it is a part of. In a world of several processes no step is taken again: with
        `on_oom="halve"` it raises in all of them, whatever has failed in one; with `"raise"` in the one alone, for which the others wait.

        Args:
            batch: a batch of `loader`, or one like the task's own on any device, which is cut into micro batches. A batch
                with fewer samples than a full step is weighted correctly. In a world of several processes it is this one's part.

        Returns:
            The mean loss over the samples: a scalar on the device, without gradient. Reading it waits for the device.

        Raises:
            TaskError: the batch has to be cut, and cannot be.
            ConfigError: the batch has to be cut, and a technique of the config takes whole batches only.
            PeerError: another process has failed, or is gone; it says which, and how, where that was told. Not with `on_oom="raise"`.
            Exception: out of memory, as torch raises it; with `on_oom="halve"` a note says why the step was not taken again.
        """
        if self._recovery is not None:
            return self._recovery.step(self, self._micro_batches(batch))
        with self._shared():
            loss = self.accumulate(batch)
            self.update()
        return loss

    def accumulate(self, batch: Any, *, is_last: bool = True) -> torch.Tensor:
        """Add the gradient of the mean loss over `batch` to the parameters' gradients: the first half of `step`.

        Micro batches are weighted by the number of terms in their mean loss, so the sum is the gradient of the whole
        batch and not the mean of means. A micro batch without terms (no label in it counts) is left out, as the whole
        batch would do. If none has a term, loss and gradient are those that the task's loss gives for no terms, as in
        plain training: NaN and zero for torch's cross entropy.

        Args:
            is_last: of the step, so that processes of a world put their gradients together.
        """
        micro_batches = self._micro_batches(batch)
        if self.task.takes_whole_steps:  # updates included
            (whole,) = micro_batches
            with self.ready(whole) as ready:
                return self.task.whole_step(self.model, self.optimizer, ready)
        if len(micro_batches) > 1 and self._one_micro_batch:
            raise ConfigError(
                f"this batch makes {len(micro_batches)} micro batches, but {self._one_micro_batch}; step on at most "
                f"{self.config.batch_size} samples"
            )
        if self._spread is not None:
            if not isinstance(batch, StepBatch) and not self._together.agree(len(micro_batches)):
                raise TaskError(
                    f"this process's part of the batch makes {len(micro_batches)} micro batches, and another's makes another "
                    "number: all processes have to take as many; give each as many samples"
                )
            return self._accumulate_together(micro_batches, self._spread, is_last)
        self._position, shares = 0, [1.0]
        if len(micro_batches) > 1:  # of one alone no terms are counted, which would wait for the device
            shares = shares_of(list(map(self.task.weight, micro_batches, micro_batches.sizes)))
        total = torch.zeros((), device=self.device)
        with numbered(self.model, micro_batches.numbers) as number:
            for self._position, (micro, share) in enumerate(zip(micro_batches, shares, strict=True)):
                if share == 0:  # the mean over nothing is NaN, and zero times that as well
                    continue
                number(self._position)
                total = total + self._backward(micro, share)  # in the wider of the two types
        return total

    def _backward(self, micro_batch: Any, share: Any = 1.0) -> torch.Tensor:
        """Add the gradient of a micro batch's share of the loss to the parameters' gradients. Returns that share."""
        loss = self.loss(micro_batch)
        if isinstance(share, torch.Tensor):
            loss = loss * share.to(loss.dtype)
        elif share != 1:
            loss = loss * share
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def _accumulate_together(self, micro_batches: StepBatch, spread: Spread, is_last: bool) -> torch.Tensor:
        """`accumulate` over all processes of the world, each with as many micro batches as the others.

        Gradients are averaged over the processes, so that each weights its micro batches by their terms, times the number of
        processes, over the terms of all. A micro batch without terms takes part, since the others wait for it, and adds nothing.
        """
        terms = list(map(self.task.weight, micro_batches, micro_batches.sizes))
        weights = torch.tensor(terms, dtype=torch.float64, device=self.device)
        of_all = sum_over(weights.sum())
        shares = torch.where(of_all > 0, weights * self.world.size / of_all, 1 / len(weights))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        taken = self._with_terms(micro_batches, terms, of_all)
        for self._position, (micro, share) in enumerate(zip(taken, shares, strict=True)):
            with spread.synchronizing(is_last and self._position == len(weights) - 1):
                loss = self._backward(micro, share)
            total = total + torch.where(share > 0, loss, torch.zeros_like(loss))
        self.own_loss = total
        return sum_over(total / self.world.size).to(loss.dtype)

    def loss(self, micro_batch: Any) -> torch.Tensor:
        """The mean loss of one micro batch, with gradient, as `step` computes it. This runs the forward pass only."""
        with self.ready(micro_batch) as ready:
            if self._spread is None:
                return self.task.loss(self.model, ready)
            loss: torch.Tensor = self._spread.run(self.task.loss, ready)
            return loss

    def evaluate(self, data: Any = None, *, batch_size: int | None = None) -> dict[str, float]:
        """Evaluate the model, in the config's precision and without gradients, without changing how training goes on.

        Where memory runs out, a batch is evaluated in halves (`prepare`'s `on_oom`). In a world of several processes it is not:
        it raises as `step` does. All of them call this, and all have the means over what each was given.

        Args:
            data: batches, such as a data loader yields, or a dataset; None for the task's `eval_dataset`, or what a
                LightningModule's own `val_dataloader` gives. Several processes share out a dataset; batches are this one's own.
            batch_size: of a dataset: `result.evaluation.eval_batch_size`. None for that of training. With it, `data` is a
                dataset of any kind; without it, one given here that is no `torch.utils.data.Dataset` is taken for batches.

        Returns:
            The means of what the task's `eval_step` returns, `loss` without one; for a LightningModule what its
            `validation_step` and `on_validation_epoch_end` log, metrics included. Each batch is weighted as in training: by
            `loss_weight`, the targets that count, or the samples.

        Raises:
            TaskError: there is no such data or nothing in it that counts, or no loss to evaluate with.
            PeerError: as `step` does.
            Exception: out of memory, as torch raises it; with `on_oom="halve"` a note says why the batch was not halved.
        """
        is_dataset = data is None or batch_size is not None or isinstance(data, torch.utils.data.Dataset)
        task = self.task
        if data is None:
            data, task = task.evaluation_set(), task.on_evaluation_data()
        if data is None:
            raise TaskError(
                "there is nothing to evaluate on; give a loader of batches or a dataset, or write eval_dataset()"
            )
        if is_dataset:
            options = without_sampler(self._loader_options)
            data = own_samples(data, self.world)
            data = one_by_one(micro_loader(task, data, batch_size or self.config.batch_size, shuffle=False, **options))
        with self._shared():
            return self.evaluator.means(data)

    def state_dict(self) -> dict[str, Any]:
        """What has to be kept to go on later: of model, optimizer and scaler, by the model's own names.

        Where no step has been taken, the optimizer's state is made for it, as torch does. In a world of several processes it is
        this process's part: `torch.distributed.checkpoint.save(session.state_dict(),
        checkpoint_id=folder)` in all of them keeps the whole. To go on, in a world of any size: `state = session.state_dict()`,
        `torch.distributed.checkpoint.load(state, checkpoint_id=folder)`, `session.load_state_dict(state)`.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._require_one_optimizer()
        stepping = _stepping(self.optimizer)
        _copy_options(self.optimizer, stepping)
        model, optimizer = get_state_dict(self.model, stepping)
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {"model": model, "optimizer": optimizer, **scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has kept, in a session of any config.

        What was learned, and options such as the learning rate, are the state's. How the update is computed stays as this
        session's config has it.

        Args:
            state: as `state_dict` returns it.
        """
        from torch.distributed.checkpoint.state_dict import set_state_dict

        self._require_one_optimizer()
        stepping = _stepping(self.optimizer)
        flags = [{name: group[name] for name in _FLAGS if name in group} for group in stepping.param_groups]
        set_state_dict(self.model, stepping, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, own in zip(stepping.param_groups, flags, strict=True):
            group.update(own)
        lay_out(stepping)
        _copy_options(stepping, self.optimizer)
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def _require_one_optimizer(self) -> None:
        if self.task.takes_whole_steps:
            raise TaskError(
                "the task's own step has optimizers of its own; keep their state_dict() and the model's yourself"
            )

    def update(self) -> None:
        """Unscale, clip if the task asks for it, step, and clear the gradients: the second half of `step`.

        Nothing is left to do for a task that takes whole steps of its own.
        """
        if self.task.takes_whole_steps:
            count_step(self.model)
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.task.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        count_step(self.model)

    def _micro_batches(self, batch: Any) -> StepBatch:
        if isinstance(batch, StepBatch):
            return batch
        if self.task.takes_whole_steps:
            return StepBatch([(batch, self.config.batch_size)])
        try:
            return split(batch, self.task.cuts(), self.config.batch_size)
        except CannotCutError as error:
            if self.config.accumulation_steps == 1:
                return StepBatch([(batch, self.config.batch_size)])
            raise TaskError(
                f"this batch cannot be cut into {self.config.accumulation_steps} micro batches: it holds {error}; step on "
                "what session.loader yields, or give the micro batches that you made: "
                "`session.step(StepBatch((make_batch(n), n) for ...))` with autotune.task.batches.StepBatch"
            ) from None


def _stepping(optimizer: Any) -> Any:
    """The optimizer that has the state: of one that is sharded by whole parameters, that of this process's share."""
    return getattr(optimizer, "optim", optimizer)


def _copy_options(of: Any, to: Any) -> None:
    """Give the groups of one optimizer the options of another's, such as the learning rate that a scheduler has set."""
    for source, target in zip(of.param_groups, to.param_groups, strict=True):
        target.update({name: value for name, value in source.items() if name != "params"})


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Lay an optimizer's state out as its implementation expects it.

    Fused kernels walk moments and parameters in the order of memory, and count steps on the device; others count on the host.
    """
    for group in optimizer.param_groups:
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state, laid_out = optimizer.state.get(parameter, {}), (parameter.stride(), parameter.device)
            for name, value in state.items():
                if type(value) is not torch.Tensor:  # subclasses have layouts of their own
                    continue
                if name == "step":
                    if counts_on_device:
                        state[name] = value.to(parameter.device, torch.float32)
                    elif "fused" in group:
                        state[name] = value.cpu()
                elif value.shape == parameter.shape and (value.stride(), value.device) != laid_out:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class ProcessWide:
    """What the latest session has switched on for the whole process. The next one begins without it.

    Attributes:
        choices: technique -> its choice.
    """

    def __init__(self) -> None:
        self.choices: Mapping[str, Choice] = {}
        self._undo = ExitStack()
        atexit.register(self._undo.close)  # before the interpreter takes apart what it calls

    def end(self) -> None:
        """Undo what the latest session has switched on. What the script has set itself since then stays."""
        again = end_switches()
        self._undo.close()
        apply_settings(again)
        self.choices = {}

    def begin(self, config: Config, techniques: Techniques, settings: Mapping[str, Any]) -> None:
        """Undo what the session before has switched on; the end of what `config` switches on begins here.

        Args:
            settings: of the task, which are set as long.
        """
        self.end()
        before = read_settings()
        with switching():
            apply_settings(settings)
        since = read_settings()
        self._undo.callback(apply_settings, {name: own for name, own in before.items() if since.get(name) != own})
        on = techniques.switched_on(config)
        self.choices = {name: choice for name, choice in on if techniques[name].is_process_wide(choice)}
        for name in self.choices:
            self._undo.enter_context(techniques[name].restored())

    def keep(self) -> None:
        """Let what is switched on stay, whatever is prepared later: something else than a session goes on with it."""
        atexit.register(self._undo.pop_all().close)  # a context that nobody holds ends at once
        end_switches()


PROCESS_WIDE = ProcessWide()


class Ready:
    """Gives a micro batch on the device as techniques want it, within their contexts. It holds nothing of the session."""

    def __init__(self, build: Build) -> None:
        self._own = PROCESS_WIDE.choices
        self._device = build.device.torch_device
        self.transforms = tuple(build.batch_transforms)
        self.contexts = tuple(build.forward_contexts)

    @contextmanager
    def __call__(self, micro_batch: Any) -> Iterator[Any]:
        """The micro batch for a forward pass, which is to run until the context ends."""
        if self._own != PROCESS_WIDE.choices:
            _LOG.warning(
                "another session was prepared in this process since: this one goes on with %s for the whole process, in place of %s; "
                "prepare it again, or give each a process of its own",
                _words(PROCESS_WIDE.choices),
                _words(self._own),
            )
            self._own = PROCESS_WIDE.choices
        micro_batch = to_device(micro_batch, self._device)
        for transform in self.transforms:
            micro_batch = transform(micro_batch)
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            yield micro_batch


def _words(choices: Mapping[str, Choice]) -> str:
    return ", ".join(f"{name}={choice}" for name, choice in choices.items()) or "nothing switched on"


def prepare(
    task: Task | str | Path,
    config: Mapping[str, Choice] | Config,
    *,
    device: str | Device = "auto",
    global_batch: int | None = None,
    on_oom: Literal["halve", "raise"] = HALVE,
    world: World | None = None,
) -> Session:
    """Make a task ready to train with a config: exactly what a probe measures.

    What a config switches on for the whole process ends when the next session is prepared in it. Memory that torch's CUDA allocator
    holds stays as it was taken, and its settings do before torch 2.10.

    Args:
        task: a task, or the path of a `model.py`.
        config: a config dict. Techniques that it does not name are off; the default batch size is the baseline's.
        device: `auto`, `cpu`, `cuda` or `cuda:1`. A GPU becomes the current one of the process, as in a probe; of a launched
            process, `auto` and `cuda` mean the one of its `LOCAL_RANK`.
        global_batch: samples per optimizer step, in place of the task's own.
        on_oom: what `step` does when memory runs out. `halve` takes the same step again in smaller micro batches, where what
            the first attempt changed can be restored (`autotune.recovery`); `raise` does not, as in a probe. Where the loss
            couples the samples of a batch (contrastive, with negatives from the batch), smaller micro batches learn something
            else, and `halve` raises, too: the first time it compares the gradient of a few samples with that of their
            halves. To be able to restore, `halve` takes note of the state before each step. That takes processor time which probes do
            not measure: some 0.05 ms a step, and 0.1 ms with 800 parameters and 100 buffers. In a world of several processes `halve`
            takes no step again, since the others are somewhere in it, which none can take back: it raises in all of them, with the
            reason, whatever fails in one; with gloo once the process that failed has ended. With `raise` nobody tells the others.
        world: the processes that train the model together, this one among them: the global batch is what all of them take.
            None for the world that this process was launched into (`torchrun`), whose process group it joins.

    Raises:
        TaskError: the model file is not valid, or one of its functions returns something unsuitable.
        ConfigError: the config is not valid, or does not keep the task's global batch; the environment says that several
            processes train, and not how they find each other.
        DeviceError: there is no such device, or another process of the launched world has taken it.
        UnsupportedError: a technique cannot be applied to this model on this device.
    """
    if not isinstance(task, Task):
        with as_script_has_them():  # the file may set what a session has switched on
            task = load_task(task)
    if global_batch is not None:
        task = replace(task, global_batch=global_batch)
    techniques, is_launched = find_techniques(), world is None
    world = launched_world() if world is None else world
    config = _complete(config, task, world, techniques)
    if on_oom not in (HALVE, RAISE):
        raise ConfigError(f"on_oom={on_oom!r} is not known; expected {HALVE!r} or {RAISE!r}")
    opened = open_device(launched_device(device, world)) if isinstance(device, str) else device
    build = Build(task=task, device=opened, config=config, world=world)
    build.device.enter()
    PROCESS_WIDE.begin(config, techniques, build.task.settings)
    _apply(build, techniques, Phase.TASK)
    _apply(build, techniques, Phase.PROCESS)
    build.model = build.task.model().to(build.device.torch_device)
    _apply(build, techniques, Phase.MODEL)
    _spread_out(build, techniques, is_launched=is_launched)
    build.optimizer = build.task.optimizer(build.model)
    _apply(build, techniques, Phase.OPTIMIZER)
    for change in build.optimizers:
        build.optimizer = change(build.optimizer)
    _apply(build, techniques, Phase.LOADER)
    if world.size > 1:
        build.task.dataset()  # with the numbers that all of them draw
        seed_everything(torch.initial_seed() + world.rank)  # from here on each draws batches and masks of its own
    if on_oom == RAISE:
        return Session(build)
    # the others of a world are somewhere in a step that cannot be taken back
    return Session(build, Recovery(build)) if world.size == 1 else Session(build, alarm=Alarm(world, opened))


def _complete(config: Any, task: Task, world: World, techniques: Techniques) -> Config:
    """The whole config of a session."""
    if not isinstance(config, Config | Mapping):
        raise ConfigError(f"{config!r} is not a config; expected a dict such as the config of a search's result")
    found = techniques.complete(config, global_batch=task.global_batch, world=world, baseline=task.baseline)
    if found.accumulation_steps > 1 and task.takes_whole_steps:
        raise UnsupportedError(
            f"accumulation_steps={found.accumulation_steps}: the task's own step takes all its samples at "
            f"once; give batch_size={found.samples_per_step}"
        )
    return found


def _spread_out(build: Build, techniques: Techniques, *, is_launched: bool) -> None:
    """Spread the model over the processes of its world, from equal parameters: as the config says, else copies of it.

    Args:
        is_launched: by others than a runner, which gives each process a device of its own.
    """
    if build.world.size == 1:
        for name, choice in techniques.switched_on(build.config, Phase.SPREAD):
            raise UnsupportedError(
                f"{name}={choice}: it needs several processes, and there is one; start the script with `torchrun --nproc-per-node N`, "
                f"or leave {name} out of the config"
            )
        return
    if build.task.takes_whole_steps:
        raise UnsupportedError(
            f"train_step cannot train in {build.world.size} processes: a whole step of your own averages no gradients; write "
            "training_step(model, batch), or train in one process"
        )
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    join(build.world, build.device.torch_device)
    if is_launched:
        require_own_device(build.world, build.device)
    with unset_fake_temporarily():  # of a trace: seeds are values
        seed = Together(build.world, build.device.torch_device).largest(torch.initial_seed() % 2**53)
    seed_everything(int(seed))  # a dataset that draws random numbers draws the same in all of them
    with build.device.count_communicators(1):
        start_equal(build.model)
    _apply(build, techniques, Phase.SPREAD)
    if build.spread is None:
        build.spread = copies_of(build)


def _apply(build: Build, techniques: Techniques, phase: Phase) -> None:
    for name, choice in techniques.switched_on(build.config, phase):
        technique = techniques[name]
        into_step = technique.reaches_into_step and build.task.takes_whole_steps
        if reason := REACHES_INTO_STEP if into_step else technique.conflict(build.config):
            raise UnsupportedError(f"{name}={choice}: {reason}")
        with switching() if technique.is_process_wide(choice) else nullcontext():
            technique.apply(build, choice)
