"""`Task`: the user's model, data, loss and optimizer behind one small interface."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.errors import TaskError, first_line
from autotune.lazy import given, torch
from autotune.randomness import keep_randomness
from autotune.records.config import BATCH_SIZE, DEFAULT_BATCH_SIZE, Choice
from autotune.task import adapters, handed_over, losses, model_file, samples
from autotune.task.adapters import Validation
from autotune.task.model_file import Origin
from autotune.task.usercode import describe

if TYPE_CHECKING:
    from autotune.task.batches import CannotCutError, Cuts


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What the user trains. `load_task` makes it from `model.py`, or it is built directly.

    Attributes:
        build_model: returns the model, on the CPU, freshly initialised; with `variants` it takes one of their names.
        make_batch: returns a micro batch with the given number of samples, on the CPU, of the largest shape that training
            will meet.
        training_step: returns the scalar mean loss of a batch; None for the default losses.
        train_step: in place of `training_step`, a whole optimizer step of the user's own on a batch: `optimizers` is what
            `configure_optimizers` returned. It may return losses to show. It is one unit, into which no technique reaches.
            The manual optimization of a LightningModule is taken so, too.
        configure_optimizers: returns the optimizer for a model, or, for `train_step`, several; None for AdamW.
        train_dataset: returns the training set, instead of or beside `make_batch`.
        collate_fn: makes a micro batch from a list of samples; None for torch's default.
        checkpoint_blocks: returns the modules that activation checkpointing may recompute; None to find them.
        loss_weight: returns the number of terms that the mean loss of a micro batch averages over (tokens, say), so that
            accumulation weights it correctly; None for the number of samples.
        eval_step: returns what evaluation finds of a batch without gradients: its mean loss, or a dict of such means; None for
            the loss, or what a LightningModule logs in its `validation_step`.
        eval_dataset: returns what to evaluate on; None for what is trained on, or what a LightningModule's `val_dataloader`
            gives beside its `train_dataloader`.
        eval_collate_fn: makes a micro batch of samples of `eval_dataset`; None for `collate_fn`.
        global_batch: samples per optimizer step; None leaves it open.
        baseline: what the user runs today, as a partial config dict; None for plain fp32.
        max_grad_norm: gradients are clipped to this norm before each optimizer step; None for no clipping.
        fixed_accumulation: why another number of micro batches per optimizer step than the baseline's learns something else,
            so that it is tried only if it is included; empty where it does not. Or a function that finds it out, by a model and a
            small batch on the device; what it returns is told as a warning.
        variants: names of architectures that `build_model` takes; the first is trained unless a config says otherwise.
        freeze: names of modules and parameters that a config may leave untrained, each a choice (several with `+` between
            them); None to find leading parts of the model.
        eval: whether a search is to find the batch size for evaluation too.
        name: short name, used for the study.
        warnings: what the user should know about how the task was made; told with the answer.
        made_by: the call that made it of what an integration tunes, for the lines that run an answer; not for users to set.
        settings: what is set in torch while it trains, in place of what its process has set (`process_settings.read_settings`); not for
            users to set.
        origin: where `load_task` found it; not for users to set.

    Raises:
        TaskError: a function cannot be called with the arguments above, a constant is not valid, or there is no data.
    """

    build_model: Callable[..., torch.nn.Module]
    make_batch: Callable[[int], Any] | None = None
    training_step: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    train_step: Callable[[torch.nn.Module, Any, Any], Any] | None = None
    configure_optimizers: Callable[[torch.nn.Module], Any] | None = None
    train_dataset: Callable[[], Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    checkpoint_blocks: Callable[[torch.nn.Module], Sequence[torch.nn.Module]] | None = None
    loss_weight: Callable[[Any], float] | None = None
    eval_step: Callable[[torch.nn.Module, Any], Any] | None = None
    eval_dataset: Callable[[], Any] | None = None
    eval_collate_fn: Callable[[list[Any]], Any] | None = None
    global_batch: int | None = None
    baseline: Mapping[str, Choice] | None = None
    max_grad_norm: float | None = None
    fixed_accumulation: str | Callable[[torch.nn.Module, Any], str] = ""
    variants: Sequence[str] | None = None
    freeze: Sequence[str] | None = None
    eval: bool | None = None
    name: str = "task"
    warnings: Sequence[str] = ()
    made_by: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        model_file.check_fields(vars(self))
        if self.make_batch is None and self.train_dataset is None:
            data = adapters.LightningData(
                partial(self.build_model, *self.variants[:1]) if self.variants else self.build_model
            )
            object.__setattr__(self, "train_dataset", data.train_dataset)
            if self.collate_fn is None:
                object.__setattr__(self, "collate_fn", data.collate_fn)

    @classmethod
    def from_loader(
        cls,
        model: torch.nn.Module,
        loader: torch.utils.data.DataLoader[Any],
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **fields: Any,
    ) -> Task:
        """The task of a training loop: `optimizer.step()` on `loss(model(*inputs), target)` for each batch of `loader`.

        Nothing given here is trained on, moved or read from: each probe has copies.

        Args:
            model: in any state, on any device.
            loader: its dataset, `collate_fn` and batch size are the task's, and its options the baseline's. In a launched
                script the batch is one process's; in a model file it is that of all processes, as `GLOBAL_BATCH` is. What a session's
                loader does otherwise is among the task's `warnings`.
            loss: a function of the model's output and the last element of a batch; None for the default losses.
            optimizer: one over the model's parameters, whatever its state; None for AdamW.
            **fields: fields of `Task`, in place of those that follow from the above: `training_step`, say, for another step.

        Raises:
            TaskError: one of these cannot be used; the message says why.
        """
        task: Task = given("task_of_loop")(model, loader, loss, optimizer, **fields)
        return task

    def with_other_models(self, **changes: Any) -> Task:
        """The same task on the same data with other models, by another `build_model` or other `variants`.

        It counts as coming from the same source: a config says which of the models is trained.
        """
        origin = self.origin and replace(self.origin, loaded={**self.origin.loaded, **changes})
        if (data := self._lightning_data) is not None and "build_model" in changes:
            own = data.of_models(changes["build_model"])
            changes["train_dataset"] = own.train_dataset
            if self.collate_fn == data.collate_fn:
                changes["collate_fn"] = own.collate_fn
        return self._with_same_data(origin=origin, **changes)

    def on_evaluation_data(self) -> Task:
        """The same task without a global batch, trained on what it is evaluated on: its sessions show what evaluating takes."""
        if self._evaluates_on is not None:
            function, collate_fn = self._evaluates_on
            return replace(self, global_batch=None, make_batch=None, train_dataset=function, collate_fn=collate_fn)
        return self._with_same_data(global_batch=None)

    def _with_same_data(self, **changes: Any) -> Task:
        task = replace(self, **changes)
        _KNOWN[task] = replace(_KNOWN.setdefault(self, _Known()), last_model=None)
        return task

    @property
    def _evaluates_on(self) -> tuple[Callable[[], Any], Callable[[list[Any]], Any] | None] | None:
        """The functions that return the set to evaluate on and make its batches; None where only the training set is known."""
        if self.eval_dataset is not None:
            return self.eval_dataset, self.eval_collate_fn or self.collate_fn
        data = self._lightning_data
        if data is None or not data.validates():
            return None
        return data.eval_dataset, data.eval_collate_fn if self.collate_fn == data.collate_fn else self.collate_fn

    @property
    def _lightning_data(self) -> adapters.LightningData | None:
        """The loaders of a LightningModule, where the data is theirs."""
        owner = getattr(self.train_dataset, "__self__", None)
        return owner if isinstance(owner, adapters.LightningData) else None

    def model(self) -> torch.nn.Module:
        """Build the model, of the first of `variants`, on the CPU, in training mode. What a LightningModule or a live model holds in
        evaluation mode stays so.

        Raises:
            TaskError: the result is not a module, has nothing to train, or is not a new model.
        """
        model: Any = self.build_model(*(self.variants or ())[:1])
        if not isinstance(model, torch.nn.Module):
            hint = "is `return model` missing?" if model is None else "return the module itself"
            raise TaskError(f"build_model returned {describe(model)}; expected a torch.nn.Module: {hint}")
        known = _KNOWN.setdefault(self, _Known())
        if known.last_model is not None and known.last_model() is model:
            raise TaskError(
                f"build_model returned the same {type(model).__name__} twice; expected a new one each time: create the "
                "model inside build_model, so that no run starts from the parameters of another"
            )
        known.last_model = weakref.ref(model)
        adapters.adapt(model)
        if lazy := next((module for module in model.modules() if adapters.is_lazy(module)), None):
            raise TaskError(
                f"build_model returned a {type(model).__name__} whose {type(lazy).__name__} has no shape yet; run a batch "
                "through the model before build_model returns it, or write the sizes out"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            frozen = any(True for _ in model.parameters())
            seen = "no parameter that requires a gradient" if frozen else "no parameters"
            hint = "set requires_grad on what is to be trained" if frozen else "assign its layers to its attributes"
            raise TaskError(
                f"build_model returned a {type(model).__name__} with {seen}; expected something to train: {hint}"
            )
        known.manual = adapters.is_lightning(model) and not model.automatic_optimization
        known.lightning, known.shifts_labels = adapters.is_lightning(model), adapters.shifts_labels(model)
        return adapters.switch_to_training(handed_over.own_model(model))

    def optimizer(self, model: torch.nn.Module) -> Any:
        """The user's optimizer for `model`, or AdamW over what requires a gradient; for a `train_step`, whatever
        `configure_optimizers` returned.

        Raises:
            TaskError: there are two optimizers or none, or the optimizer has none of the model's parameters.
        """
        return self.optimizer_and_schedulers(model)[0]

    def optimizer_and_schedulers(self, model: torch.nn.Module) -> tuple[Any, int]:
        """Like `optimizer`, with the number of learning-rate schedulers returned with it, which are not used."""
        if self.configure_optimizers is not None:
            result: Any = self.configure_optimizers(model)
        elif adapters.is_lightning(model) and adapters.overrides(type(model), "configure_optimizers"):
            result = model.configure_optimizers()  # type: ignore[operator]
        else:
            result = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        optimizers, num_schedulers = adapters.optimizers_of(result)
        own = {id(parameter) for parameter in model.parameters()}
        for optimizer in optimizers:
            if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                raise TaskError(
                    f"configure_optimizers returned {type(optimizer).__name__} without any parameter of the model it was "
                    "given; expected one over `model.parameters()` of its argument, not over those of another model"
                )
        if adapters.is_lightning(model):
            adapters.give_optimizers(model, result)
        if self.takes_whole_steps:
            if self.train_step is None:
                adapters.take_manual_steps(model)
            return result, 0
        optimizer = adapters.sole_optimizer(optimizers)
        if adapters.is_lightning(model):
            adapters.hook_optimizer(model, optimizer)
        return optimizer, num_schedulers

    def whole_step(self, model: torch.nn.Module, optimizers: Any, batch: Any) -> torch.Tensor:
        """Take the user's own step. Returns the sum of the losses that it returned, as a scalar without gradient."""
        if self.train_step is None:
            return losses.reported(adapters.lightning_step(model, batch))
        return losses.reported(self.train_step(model, optimizers, batch))

    @property
    def takes_whole_steps(self) -> bool:
        """Whether an optimizer step is one unit of the user's: a `train_step`, or a LightningModule's manual optimization.

        A LightningModule may have to be built to know.
        """
        may_be = self.train_step is None and self.training_step is None and adapters.may_be_lightning(self.build_model)
        return self.train_step is not None or (may_be and self._known().manual)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Scalar mean loss of a micro batch that is on the model's device.

        Raises TaskError when it is not a scalar, has no gradient, or no default loss fits.
        """
        if self.training_step is not None:
            source, loss = "training_step", self.training_step(model, batch)
        elif adapters.is_lightning(model):
            source, loss = f"training_step of {type(model).__name__}", adapters.lightning_loss(model, batch)
        else:
            source, loss = f"the model's own loss ({type(model).__name__})", self._default_loss(model, batch)
        if not isinstance(loss, torch.Tensor):
            hint = "is `return loss` missing?" if loss is None else "return the loss itself, not its value or a pair"
            raise TaskError(f"{source} returned {describe(loss)}; expected the loss as a scalar tensor: {hint}")
        if loss.dim() != 0:
            hint = "`.squeeze()`" if loss.numel() == 1 else "`.mean()`"
            raise TaskError(
                f"{source} returned {describe(loss)}; expected a scalar, of shape (), the mean over the batch: add "
                f"{hint}"
            )
        if not loss.requires_grad and torch.is_grad_enabled():
            raise TaskError(
                f"{source} returned {describe(loss)} that has no gradient; expected one that depends on the model's "
                "parameters: look for `.item()`, `.detach()`, `torch.no_grad()`, or a loss made anew with "
                "`torch.tensor(...)`"
            )
        return loss

    def _default_loss(self, model: torch.nn.Module, batch: Any) -> Any:
        try:
            return losses.default_loss(model, batch)
        except TaskError as error:
            misspelt = [told for told in (self.origin.warnings if self.origin else ()) if "training_step" in told]
            if not misspelt:
                raise
            raise TaskError(f"{error}\n\n{'; '.join(misspelt)}") from None

    def evaluate(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """What evaluation finds of a batch that is on the model's device: scalars by name, `loss` where there is one alone.

        Raises:
            TaskError: `eval_step` returned neither a scalar nor a dict of scalars, or there is no loss to evaluate with.
        """
        if self.eval_step is None:
            if self.takes_whole_steps:
                raise TaskError(model_file.NOTHING_TO_EVALUATE)
            return {"loss": self.loss(model, batch)}
        found = self.eval_step(model, batch)
        values = dict(found) if isinstance(found, Mapping) else {"loss": found}
        for name, value in values.items():
            is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if not is_number:
                what = describe(value) + (f" as {name!r}" if isinstance(found, Mapping) else "")
                hint = "is `return` missing?" if value is None else "add `.mean()`"
                raise TaskError(
                    f"eval_step returned {what}; expected a scalar, the mean over the batch, or a dict of them: {hint}"
                )
        return {str(name): torch.as_tensor(value).detach().reshape(()) for name, value in values.items()}

    def validation(self, model: torch.nn.Module) -> Validation | None:
        """How a LightningModule is validated by itself; None where this task is evaluated otherwise."""
        own = self.eval_step is None and self.training_step is None and self.train_step is None
        return Validation(model) if own and Validation.is_of(model) else None

    def weight(self, batch: Any, num_samples: int) -> float:
        """How many terms `loss` averages over in this micro batch of `num_samples`.

        `loss_weight` says so. Without it, the default losses count the targets that are not ignored (a causal language
        model shifts its labels, so the first of a sequence does not count). Otherwise it is the number of samples.
        """
        if self.loss_weight is not None:
            return float(self.loss_weight(batch))
        if self.training_step is None:
            known = self._known()
            if not known.lightning:
                terms = losses.default_weight(batch, shifts_labels=known.shifts_labels)
                if terms is not None:
                    return terms
        return float(num_samples)

    def batch(self, batch_size: int, positions: Sequence[int] = ()) -> Any:
        """A micro batch of `batch_size` samples, of the largest shape, on the CPU. Raises TaskError.

        What `make_batch` or the collate function makes of that number is believed, whatever its shape.

        Args:
            positions: of samples of the training set, in place of the widest.
        """
        if self.make_batch is not None:
            name, batch = "make_batch", handed_over.own_batch(self.make_batch(batch_size))
        else:
            members = samples.widest_samples(self.dataset(), positions or self.widest(), batch_size)
            name, batch = "collate_fn", (self.collate_fn or torch.utils.data.default_collate)(members)
        if batch is None:
            raise TaskError(f"{name} returned None; expected a batch: is `return` missing?")
        if isinstance(batch, Iterator):
            raise TaskError(
                f"{name} returned {describe(batch)}, which can be read once only; expected a batch: make a list of it"
            )
        return batch

    def small_batch(self, batch_size: int) -> Any:
        """Like `batch`, of the first samples of the training set instead of its widest: quick, and always the same ones."""
        return self.batch(batch_size, range(batch_size))

    def batch_of(self, positions: Sequence[int]) -> Any:
        """A micro batch of the training set's samples at these positions (of a stream, counted from its start). Raises TaskError."""
        members = samples.widest_samples(self.dataset(), positions, len(positions))
        return (self.collate_fn or torch.utils.data.default_collate)(members)

    def cuts(self) -> Cuts:
        """Where the samples of a batch are, so that others than `make_batch` can cut it; found once per process.

        Raises:
            CannotCutError: only the task's own code can make smaller batches.
        """
        from autotune.task.batches import CannotCutError, find_cuts

        known = _KNOWN.setdefault(self, _Known())
        if not known.cuts:
            try:
                with torch.random.fork_rng(devices=[]):
                    small, large, sizes = self._two_batches()
                known.cuts = (find_cuts(small, large, sizes),)
            except CannotCutError as error:
                known.cuts = (error,)
        if isinstance(known.cuts[0], CannotCutError):
            raise CannotCutError(*known.cuts[0].args)
        return known.cuts[0]

    def _two_batches(self) -> tuple[Any, Any, tuple[int, int]]:
        """Batches of two sizes: small ones, or, where those are not legal, of once and twice the baseline's size.

        Raises CannotCutError with the reason where neither can be made.
        """
        from autotune.task.batches import CannotCutError

        usual = int((self.baseline or {}).get(BATCH_SIZE, DEFAULT_BATCH_SIZE))
        num_samples = samples.dataset_size(self.dataset()) if self.make_batch is None else None
        sizes = (1, 2) if num_samples in (1, 2) else (2, 3)
        with suppress(Exception):
            return self.small_batch(sizes[0]), self.small_batch(sizes[1]), sizes
        usual = max(1, min(usual, (num_samples or 2 * usual) // 2))
        try:
            return self.small_batch(usual), self.small_batch(2 * usual), (usual, 2 * usual)
        except Exception as error:
            raise CannotCutError(
                f"parts that are not known: making batches of {usual} and {2 * usual} samples failed ({first_line(error)})"
            ) from error

    def dataset(self) -> Any | None:
        """The training set, built once per process; None when the task has only `make_batch`."""
        if self.train_dataset is None:
            return None
        known = _KNOWN.setdefault(self, _Known())
        if known.dataset is None:
            known.dataset = samples.check_dataset(self.train_dataset())
        return known.dataset

    def evaluation_set(self) -> Any | None:
        """The set to evaluate on, built anew; None where only the training set is known."""
        return None if self._evaluates_on is None else samples.check_dataset(self._evaluates_on[0](), "eval_dataset")

    def loader_batch_size(self) -> int | None:
        """Samples of the batches that a LightningModule's own loader makes, where the data is that loader's; else None."""
        return None if self._lightning_data is None else self._lightning_data.batch_size()

    def widest(self) -> tuple[int, ...]:
        """Positions of sampled members of the training set, the widest first; empty without a training set.

        Sampling happens once per process and can take 2 s; `use_widest` passes on what another process found.
        """
        dataset = self.dataset()
        if dataset is None:
            return ()
        known = _KNOWN.setdefault(self, _Known())
        if not known.widest:
            known.widest, known.sampled_whole = samples.widest_first(dataset)
        return known.widest

    def dataset_size(self) -> int | None:
        """Samples in the training set; None without one, or for a stream that had more than were looked at."""
        dataset = self.dataset()
        size = None if dataset is None else samples.dataset_size(dataset)
        if dataset is None or size is not None:
            return size
        widest = self.widest()
        return (len(widest) or None) if _KNOWN[self].sampled_whole else None

    def use_widest(self, positions: Sequence[int]) -> None:
        """Use `positions` as the result of `widest`."""
        _KNOWN.setdefault(self, _Known()).widest = tuple(positions)

    def _known(self) -> _Known:
        """Facts that only a built model tells. Building one for them leaves all random states as they were."""
        known = _KNOWN.setdefault(self, _Known())
        if known.last_model is None:
            with keep_randomness(torch.device("cpu")):
                self.model()
        return known


@dataclass
class _Known:
    """Facts about a task, cached in this process."""

    last_model: weakref.ref[Any] | None = None
    lightning: bool = False
    manual: bool = False
    shifts_labels: bool = False
    dataset: Any = None
    widest: tuple[int, ...] = ()
    sampled_whole: bool = False
    cuts: tuple[Cuts | CannotCutError, ...] = ()


_KNOWN: weakref.WeakKeyDictionary[Task, _Known] = weakref.WeakKeyDictionary()
