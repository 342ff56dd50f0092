"""Hugging Face's Trainer is tuned as it stands."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune import prepare
from autotune.errors import ConfigError, TaskError
from autotune.probe.inspection import inspect_task
from autotune.task import Task
from autotune.task.loading import load_source
from autotune.task.process_settings import apply_settings, read_settings
from autotune.task.source import TaskSource
from tests.integrations.answers import LAUNCHED, Known, known, run_as_printed, shown

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from autotune.integrations import transformers as integration  # noqa: E402

QUIET = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
BY_OPERATOR = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and later
VOCABULARY = 50


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=VOCABULARY, **sizes, **off))
    model.accepts_loss_kwargs = False  # else Trainer adds up the means of the micro batches, which this loss returns
    return model


def accepting() -> Any:
    """As it comes: Trainer tells its loss how many labels a step has."""
    model = bert()
    del model.accepts_loss_kwargs
    return model


def gpt() -> Any:
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **off)
    )


def sentences(number: int = 16) -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCABULARY, (8,), generator=made), "labels": i % 2} for i in range(number)]


def texts(number: int = 16) -> list[dict[str, Any]]:
    """Lines with unequal numbers of labels that count."""
    lines = sentences(number)
    labels = [torch.where(torch.arange(8) < 3 + i % 5, line["input_ids"], -100) for i, line in enumerate(lines)]
    return [{"input_ids": line["input_ids"], "labels": label} for line, label in zip(lines, labels, strict=True)]


def arguments(folder: Path, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 1,
        "learning_rate": 1e-2,
    }
    usual["adam_epsilon"] = 1e-2  # else a first step is the gradients' signs, those of zeros included
    return transformers.TrainingArguments(output_dir=str(folder), **{**QUIET, **usual, **changes})


def trainer_of(folder: Path, cls: Any = None, *, args: dict[str, Any] | None = None, **given: Any) -> Any:
    given = {"model": bert(), "train_dataset": sentences(), **given}
    return (cls or transformers.Trainer)(args=arguments(folder, **(args or {})), **given)


def in_a_world(patch: pytest.MonkeyPatch) -> None:
    """What Trainers that are there already are told of two processes, without a second one."""
    for name, value in LAUNCHED.items():
        patch.setenv(name, value)
    patch.setattr(transformers.TrainingArguments, "world_size", 2)


def in_a_probe(trainer: Any, folder: Path) -> Task:
    """The task as the process of a probe has it."""
    return load_source(TaskSource.of(integration.task_of(trainer)).hand_over(folder))


class Weighted(transformers.Trainer):  # type: ignore[misc, name-defined]
    """As the documentation has it, with state of its own, and with a wrapper around the step as SFTTrainer has."""

    def __init__(self, *args: Any, weights: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = weights

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        labels = inputs.pop("labels")
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels, self.weights, reduction="sum")
        return loss / num_items_in_batch

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            return super().training_step(*args, **kwargs)


class Twice(transformers.Trainer):  # type: ignore[misc, name-defined]
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


class Averaged(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Its loss is a mean over the micro batch, however many labels the step has."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        return torch.nn.functional.cross_entropy(model(**inputs).logits, labels)


class Declared(Averaged):
    loss_is_scaled_for_ga = False


class Late(Averaged):
    """Says once it is made that its loss takes no number of labels, as trainers of TRL do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class Delegating(transformers.Trainer):  # type: ignore[misc, name-defined]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Slopes(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Its loss takes a derivative itself, which it cannot without gradients."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> torch.Tensor:
        loss = model(**inputs).loss
        (slope,) = torch.autograd.grad(loss, model.classifier.weight, create_graph=True)
        return loss + slope.square().sum()  # type: ignore[no-any-return]


def mean_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def looked_at(trainer: Any) -> tuple[tuple[int, ...], str]:
    """The accumulation steps that are searched unasked, and what the user is told; the step has 16 samples, taken four at a time."""
    found = inspect_task(integration.task_of(trainer), device="cpu", memory_limit_bytes=None)
    return found["batch"]["accumulation_steps"], " ".join(found["facts"]["warnings"])


ANY, AS_BEFORE = (1, 2, 4, 8, 16), (4,)


@pytest.mark.parametrize(
    ("cls", "given", "args"),
    [
        (None, {}, {}),
        (None, {"model": gpt, "train_dataset": texts()}, {"optim": "adamw_torch_fused", "weight_decay": 0.1}),
        (None, {"model": gpt, "train_dataset": texts()}, {"label_smoothing_factor": 0.1}),
        (None, {"compute_loss_func": loss_of}, {"optim": "sgd"}),
        (None, {"model": None, "model_init": bert}, {"optim": "sgd", "max_grad_norm": 0.1}),
        (Weighted, {"model": accepting, "weights": torch.tensor([0.2, 0.8])}, {"gradient_accumulation_steps": 2}),
    ],
    ids=["plain", "labels that count", "smoothed", "loss function", "model_init", "SFT-style"],
)
def test_a_probe_takes_the_step_that_the_trainer_takes(cls: Any, given: Any, args: Any, tmp_path: Path) -> None:
    """Every sample is in the one step, so that their order does not matter."""
    given = {name: value() if name == "model" and value else value for name, value in given.items()}
    trainer = trainer_of(tmp_path, cls, args=args, **given)
    dataset = trainer.train_dataset
    trainer.train_dataset = dataset[: 4 * trainer.args.gradient_accumulation_steps]
    session = prepare(in_a_probe(trainer, tmp_path), integration.task_of(trainer).baseline or {}, device="cpu")
    session.step(next(iter(session.loader)))
    trainer.train()
    for (name, ours), theirs in zip(session.model.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_where_trainer_would_scale_the_gradients_by_accumulating_it_accumulates_as_before(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model=accepting())
    steps, told = looked_at(trainer)
    assert steps == AS_BEFORE and "kept as they are: the loss of BertForSequenceClassification ignores" in told
    assert "set model.accepts_loss_kwargs = False before the Trainer is made" in told
    batch = inspect_task(integration.task_of(trainer), device="cpu", memory_limit_bytes=None)["batch"]
    assert batch["optional_accumulation_steps"] == (1, 2, 8, 16)
    for given in ({}, {"model": gpt(), "train_dataset": texts()}):
        steps, told = looked_at(trainer_of(tmp_path, **given))
        assert steps == ANY and "kept as they are" not in told


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (Averaged, {"model": accepting}),
        (Delegating, {"model": accepting}),
        (None, {"model": accepting, "compute_loss_func": mean_of}),
        (None, {"compute_loss_func": mean_of}),
    ],
    ids=["compute_loss", "the model's own", "compute_loss_func", "compute_loss_func, of a model that takes no number"],
)
def test_where_an_own_loss_ignores_how_many_labels_a_step_has_the_accumulation_stays(
    cls: Any, given: Any, tmp_path: Path
) -> None:
    given = {name: value() if name == "model" else value for name, value in given.items()}
    steps, told = looked_at(trainer_of(tmp_path, cls, **given))
    name = f"{cls.__name__}.compute_loss" if cls else "compute_loss_func"
    assert steps == AS_BEFORE and f"kept as they are: {name} ignores num_items_in_batch, so Trainer adds up" in told
    if hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
        assert f"set loss_is_scaled_for_ga = False on {cls.__name__ if cls else 'Trainer'}" in told


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (Weighted, {"model": accepting, "weights": torch.tensor([0.2, 0.8])}),
        (Delegating, {"model": gpt, "train_dataset": texts()}),
        (None, {"model": accepting, "compute_loss_func": loss_of}),
        (Averaged, {"model": bert}),
        (Late, {"model": accepting}),
        (Declared, {"model": accepting}),
    ],
    ids=[
        "compute_loss",
        "the model's own",
        "compute_loss_func",
        "Trainer divides",
        "as in TRL",
        "Trainer is told to divide",
    ],
)
def test_where_an_own_loss_is_a_mean_over_the_step_any_accumulation_is_tried(
    cls: Any, given: Any, tmp_path: Path
) -> None:
    if cls is Declared and not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
        pytest.skip("this Trainer asks for no loss_is_scaled_for_ga")
    given = {name: value() if name == "model" else value for name, value in given.items()}
    steps, told = looked_at(trainer_of(tmp_path, cls, **given))
    assert steps == ANY and "kept as they are" not in told


def test_where_a_loss_cannot_be_computed_among_other_labels_the_accumulation_stays(tmp_path: Path) -> None:
    steps, told = looked_at(trainer_of(tmp_path, Slopes, model=accepting()))
    assert steps == AS_BEFORE
    assert re.search(
        r"whether Slopes\.compute_loss divides .* could not be measured .*include 'accumulation_steps'", told
    )


class Adapted(torch.nn.Module):
    """As PEFT wraps a model of a known task: it names the labels, and passes on the rest unseen."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def get_base_model(self) -> torch.nn.Module:
        return self.base_model

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.base_model(input_ids=input_ids, labels=labels, **kwargs)


def test_a_model_in_an_adapter_accumulates_as_the_model_itself_does(tmp_path: Path) -> None:
    assert looked_at(trainer_of(tmp_path, model=Adapted(gpt()), train_dataset=texts()))[0] == ANY
    steps, told = looked_at(trainer_of(tmp_path, model=Adapted(accepting())))
    assert steps == AS_BEFORE and "the loss of BertForSequenceClassification ignores num_items_in_batch" in told
    assert "set model.get_base_model().accepts_loss_kwargs = False" in told


class Phased(torch.optim.SGD):
    """Refuses to step until it is told to train, as optimizers that need no schedule do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("the optimizer is not in train mode")
        super().step(closure)


@pytest.mark.parametrize("given", [True, False], ids=["the user's", "the trainer's"])
def test_an_optimizer_that_has_to_be_told_to_train_steps_in_probes(given: bool, tmp_path: Path) -> None:
    model = bert()
    own = Phased(model.parameters())
    words: dict[str, Any] = (
        {"optimizers": (own, None)} if given else {"optimizer_cls_and_kwargs": (Phased, {"lr": 0.1})}
    )
    session = prepare(in_a_probe(trainer_of(tmp_path, model=model, **words), tmp_path), {}, device="cpu")
    session.step(next(iter(session.loader)))
    assert type(session.optimizer) is Phased and not own.param_groups[0]["train_mode"]


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_an_8_bit_adamw_of_bitsandbytes_is_made_in_probes_as_in_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def chosen(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        asked.append(transformers.training_args.OptimizerNames(args.optim).value)
        return torch.optim.SGD, {"lr": 0.1}

    monkeypatch.setattr(transformers.Trainer, "get_optimizer_cls_and_kwargs", staticmethod(chosen))
    task = integration.task_of(trainer_of(tmp_path, args={"optim": name}))
    assert task.baseline is not None and "optimizer_state" not in task.baseline
    prepare(task, {}, device="cpu")
    assert {*asked} == {name}


def test_compiling_in_the_usual_words_is_the_baseline(tmp_path: Path) -> None:
    asked = [{"torch_compile": True}, {"torch_compile_mode": "reduce-overhead"}, {"torch_compile_backend": "inductor"}]
    for args, expected in zip(asked, ["default", "reduce-overhead", "default"], strict=True):
        task = integration.task_of(trainer_of(tmp_path, args=args))
        assert task.baseline is not None and task.baseline["compile"] == expected


def test_compiling_stays_as_it_was_said_where_the_answer_leaves_it(tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 24, "torch_compile": True}
    trainer = trainer_of(tmp_path, args=asked)
    found = integration.tune(trainer, **known(tmp_path, compile="default"))
    assert (found.torch_compile, found.torch_compile_backend, found.torch_compile_mode) == (True, "inductor", None)
    assert found.bf16 and trainer.args.torch_compile_mode is None


def test_an_answer_that_compiles_without_tf32_says_so_since_a_trainer_that_compiles_switches_it_on(
    tmp_path: Path,
) -> None:
    args = trainer_of(tmp_path).args
    compiled = {"torch_compile": True, "torch_compile_mode": "default"}
    assert integration._with_answer(args, {**compiled, "tf32": None}).tf32 is False
    assert integration._with_answer(args, {"tf32": None}).tf32 is None
    assert integration._with_answer(args, compiled).tf32 is False  # products stay as they were


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that has TF32, as far as transformers asks."""
    for module in (transformers.training_args, integration):
        monkeypatch.setattr(module, "is_torch_tf32_available", lambda: True)
    switch = getattr(transformers.training_args, "enable_tf32", None)
    if hasattr(switch, "__wrapped__"):  # else it sets nothing that it has set once in this process
        monkeypatch.setattr(transformers.training_args, "enable_tf32", switch.__wrapped__)
    before = read_settings()
    yield
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9 and later
        torch.backends.fp32_precision = "none"
    apply_settings(before)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("args", "today"),
    [({"torch_compile": True}, "tf32"), ({"torch_compile": True, "tf32": False}, "highest"), ({}, "highest")],
)
def test_tf32_that_compiling_switches_on_unasked_is_the_baselines(
    args: dict[str, Any], today: str, tmp_path: Path
) -> None:
    task = integration.task_of(trainer_of(tmp_path, args=args))
    assert task.baseline is not None and task.baseline["matmul_precision"] == today


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("args", [{"torch_compile": True}, {"tf32": True}])
def test_probes_begin_without_the_tf32_that_the_arguments_switched_on(args: dict[str, Any], tmp_path: Path) -> None:
    convolutions = read_settings()["cudnn.allow_tf32"]
    trainer = trainer_of(tmp_path, args=args)
    source = TaskSource.of(integration.task_of(trainer)).hand_over(tmp_path)
    task = load_source(source)  # sets what travels with it
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", convolutions)
    prepare(task, {"batch_size": 2, "accumulation_steps": 8}, device="cpu")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("args", [{"torch_compile": True}, {"tf32": True}])
def test_the_lines_that_run_an_answer_train_without_the_tf32_that_the_arguments_switched_on(
    args: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, args=args)
    before = read_settings()
    task = integration.task_of(trainer)
    assert read_settings() == before, "the trainer's own training goes on in TF32"
    prepare(task, {"batch_size": 2, "accumulation_steps": 8}, device="cpu")
    assert torch.get_float32_matmul_precision() == "highest"
    plain = Task(build_model=functools.partial(torch.nn.Linear, 2, 2), make_batch=lambda n: (torch.rand(n, 2),) * 2)
    prepare(plain, {"batch_size": 2}, device="cpu")
    assert read_settings() == before, "as for any other session"


@pytest.mark.usefixtures("tf32")
def test_searching_changes_nothing_of_the_process_that_its_arguments_have_set(tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 24, "torch_compile": True}
    trainer = trainer_of(tmp_path, args=asked)
    before = read_settings()
    runner = Known(today={"matmul_precision": "tf32"})
    integration.tune(trainer, **known(tmp_path) | {"runner": runner})
    assert read_settings() == before, "the arguments that come back train in TF32, too"


@pytest.mark.usefixtures("tf32")
@pytest.mark.skipif(not BY_OPERATOR, reason="before torch 2.9 the arguments overwrite what the script has set")
@pytest.mark.parametrize("own", ["high", "medium"])
def test_the_precision_that_the_script_itself_has_set_is_none_of_the_arguments(own: str, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision(own)
    trainer = trainer_of(tmp_path, args={"tf32": True})
    task = integration.task_of(trainer)
    assert task.baseline is not None and task.baseline["matmul_precision"] == "highest", "nothing that is searched"
    assert TaskSource.of(task).settings["float32_matmul_precision"] == own
    assert integration._with_answer(trainer.args, {"tf32": None}).tf32 is None


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("args", [{"torch_compile": True}, {"tf32": True}])
def test_an_answer_without_tf32_leaves_convolutions_as_they_were_measured(args: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, args=args)
    before = read_settings()
    assert integration._with_answer(trainer.args, {"tf32": None}).tf32 is False
    after = read_settings()
    for name in before:
        if "cudnn" in name:
            assert after[name] == before[name]
    assert after.get("cuda.matmul.fp32_precision", "ieee") == "ieee"
    assert after.get("float32_matmul_precision") in ("highest", None)


@pytest.mark.usefixtures("tf32")
def test_an_answer_trains_in_tf32_as_it_was_measured_whatever_else_it_changes(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile=True)  # which switches TF32 on
    assert integration._with_answer(args, {}).tf32 is None
    assert integration._with_answer(args, {"torch_compile": False}).tf32 is True
    assert integration._with_answer(args, {"tf32": None}).tf32 is False
    assert integration._with_answer(args, {"torch_compile": False, "tf32": None}).tf32 is False


def test_an_answer_without_tf32_switches_off_what_the_users_arguments_switched_on(tmp_path: Path) -> None:
    args = trainer_of(tmp_path).args
    args.tf32 = True  # where there is a GPU that can, making them so switches it on for the whole process
    assert integration._with_answer(args, {"tf32": None}).tf32 is False


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"torch_compile_backend": "aot_eager"},
            r"backend='aot_eager'.*expected 'inductor': leave .* out, or set torch_compile=F",
        ),
        (
            {"torch_compile_mode": "max-autotune"},
            r"mode='max-autotune'.*expected one of 'default', .*set one of them, or ",
        ),
    ],
)
def test_compiling_as_probes_do_not_is_refused_with_the_next_step(
    asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=message):
        integration.task_of(trainer_of(tmp_path, args=asked))


def test_an_optimizer_of_the_users_own_steps_in_probes(tmp_path: Path) -> None:
    model = bert()
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.5, momentum=0.9)
    trainer = trainer_of(tmp_path, model=model, optimizers=(optimizer, None))
    session = prepare(in_a_probe(trainer, tmp_path), {}, device="cpu")
    assert type(session.optimizer) is torch.optim.SGD and session.optimizer.param_groups[0]["momentum"] == 0.9
    assert session.optimizer.param_groups[0]["params"] == list(session.model.classifier.parameters())  # type: ignore[operator, union-attr]


def test_the_trainers_arguments_are_the_baseline(tmp_path: Path) -> None:
    said = {"bf16": True, "gradient_checkpointing": True, "dataloader_num_workers": 2, "optim": "adamw_torch_fused"}
    task = integration.task_of(trainer_of(tmp_path, args=said))
    expected = {"batch_size": 4, "accumulation_steps": 4, "amp": "bf16", "num_workers": 2, "optimizer_impl": "fused"}
    assert task.baseline is not None and expected.items() <= task.baseline.items()
    assert task.baseline["checkpoint_segments"] == 3 and task.global_batch == 16


def test_the_arguments_come_back_changed_where_the_answer_says_so(tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 24, "optim": "adamw_torch"}
    trainer = trainer_of(tmp_path, args=asked)
    found = integration.tune(trainer, **known(tmp_path))
    names = [item.name for item in fields(found)]
    changed = {name: getattr(found, name) for name in names if getattr(found, name) != getattr(trainer.args, name)}
    expected = {"per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "optim"}
    assert changed.keys() == expected and changed["bf16"] and changed["optim"] == "adamw_torch_fused"
    assert found.per_device_train_batch_size * found.gradient_accumulation_steps == 96


def test_the_lines_that_are_printed_after_a_search_run_what_was_measured(tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 24}

    def made() -> Any:
        return trainer_of(tmp_path, args=asked, train_dataset=sentences(96))

    integration.tune(made(), **known(tmp_path))
    text = shown(tmp_path)
    assert run_as_printed(text, trainer=made()).config.samples_per_step == 96
    assert f"autotune export {tmp_path / 'closed.db'} --study closed --to transformers" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, arguments that do not say so train on it")
def test_what_only_the_missing_gpu_would_change_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """Asked for bf16 and not for the CPU, the arguments raise an error there: the setup does not support it."""
    asked = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 24,
        "use_cpu": False,
        "optim": "adamw_torch_fused",
    }
    trainer = trainer_of(tmp_path, args=asked, train_dataset=sentences(96))
    found = integration.tune(trainer, **known(tmp_path))
    names = [item.name for item in fields(found)]
    changed = {name for name in names if getattr(found, name) != getattr(trainer.args, name)}
    assert changed == {"per_device_train_batch_size", "gradient_accumulation_steps", "bf16"}
    assert found.bf16 and not found.use_cpu and found.dataloader_pin_memory and found.device.type == "cpu"
    again = transformers.Trainer(model=bert(), args=found, train_dataset=sentences(96))
    autocast: set[bool] = set()
    again.model.classifier.register_forward_pre_hook(lambda *_: autocast.add(torch.is_autocast_enabled("cpu")))
    again.train()
    assert again.state.global_step == 1 and autocast == {True}


def test_the_callback_tunes_before_training_begins(tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 24, "max_steps": 2}
    callback = integration.AutotuneCallback(**known(tmp_path))
    trainer = trainer_of(tmp_path, args=asked, callbacks=[callback], train_dataset=sentences(192))
    sizes: list[tuple[int, bool]] = []
    trainer.model.classifier.register_forward_pre_hook(
        lambda _, inputs: sizes.append((len(inputs[0]), torch.is_autocast_enabled("cpu")))
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert sum(size for size, _ in sizes) == 2 * 96 and {autocast for _, autocast in sizes} == {True}
    assert {size for size, _ in sizes} == {trainer.args.per_device_train_batch_size} != {4}


@pytest.mark.parametrize("as_class", [False, True])
def test_a_callback_that_is_added_to_a_trainer_that_is_there_is_refused_before_a_step(
    as_class: bool, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path)
    added = integration.AutotuneCallback
    trainer.add_callback(added if as_class else added(**known(tmp_path)))
    with pytest.raises(ConfigError, match=r"added to a Trainer that was made already.*Trainer\(\.\.\., callbacks=\["):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_callback_of_one_trainer_that_is_added_to_another_is_refused_there(tmp_path: Path) -> None:
    callback = integration.AutotuneCallback(**known(tmp_path))
    trainer_of(tmp_path, callbacks=[callback])
    other = trainer_of(tmp_path)
    other.add_callback(callback)
    with pytest.raises(ConfigError, match="added to a Trainer that was made already"):
        other.train()
    assert other.state.global_step == 0


def test_one_callback_tunes_each_trainer_that_it_is_given_to(tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 24}
    callback = integration.AutotuneCallback(**known(tmp_path))
    trainers = [trainer_of(tmp_path, args=asked, callbacks=[callback], train_dataset=sentences(96)) for _ in range(2)]
    for trainer in trainers:
        trainer.train()
        assert trainer.args.per_device_train_batch_size != 4 and trainer.state.global_step == 1


def test_a_step_with_two_backward_passes_is_refused_with_the_reason(tmp_path: Path) -> None:
    session = prepare(in_a_probe(trainer_of(tmp_path, Twice), tmp_path), {}, device="cpu")
    with pytest.raises(TaskError, match=r"Twice calls backward 2 times; expected once.*compute_loss"):
        session.step(next(iter(session.loader)))


def test_what_cannot_be_tuned_is_refused_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no train_dataset; give it"):
        integration.tune(trainer_of(tmp_path, train_dataset=None))

    class Looped(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(TaskError, match=r"Looped has a _inner_training_loop of its own.*model file"):
        integration.tune(trainer_of(tmp_path, Looped))
    trainer = trainer_of(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(TaskError, match=r"DeepSpeed.*tune it without first"):
        integration.tune(trainer)
    with pytest.raises(
        ConfigError, match=r"devices: a search from a script is of the devices.*torchrun --nproc-per-node 2"
    ):
        integration.tune(trainer_of(tmp_path), devices=2)


def test_what_ddp_is_told_is_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ({"ddp_bucket_cap_mb": 100, "ddp_find_unused_parameters": True}, {"ddp_find_unused_parameters": False})
    told, plain = [trainer_of(tmp_path, args=args) for args in asked]
    in_a_world(monkeypatch)
    task = integration.task_of(told)
    assert task.baseline is not None and task.baseline["bucket_mb"] == 100 and task.global_batch == 32
    assert "DDP looks for unused parameters in each step of the Trainer" in "".join(task.warnings)
    task = integration.task_of(plain)
    assert task.baseline is not None and "bucket_mb" not in task.baseline and not task.warnings


def test_batches_that_processes_divide_are_refused_with_the_batch_that_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, args={"accelerator_config": {"split_batches": True}})
    in_a_world(monkeypatch)
    with pytest.raises(TaskError, match=r"divides per_device_train_batch_size=4 by its 2 .*_train_batch_size=2, which"):
        integration.task_of(trainer)


def test_trainers_that_do_not_train_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where WORLD_SIZE is set, and what Accelerate knows a launcher by is not."""
    trainer = trainer_of(tmp_path)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        TaskError, match=r"2 processes were launched, and the Trainer of each trains among 1; start .*torchrun"
    ):
        integration.task_of(trainer)


def test_another_optimizer_makes_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)

    def digest(optim: str) -> str:
        return TaskSource.of(integration.task_of(trainer_of(tmp_path, args={"optim": optim}))).script_digest()

    assert digest("sgd") == digest("sgd") != digest("adafactor")


SCALE = 1


def scaled_by(scale: int) -> Any:
    return lambda outputs, labels, num_items_in_batch=None: scale * loss_of(outputs, labels, num_items_in_batch)


def scaled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, scale: int = 1) -> torch.Tensor:
    return scale * loss_of(outputs, labels, num_items_in_batch)


def scaled_globally(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return SCALE * loss_of(outputs, labels, num_items_in_batch)


class Scaling(transformers.Trainer):  # type: ignore[misc, name-defined]
    def __init__(self, *args: Any, scale: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.scale * super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    "given",
    [
        lambda scale: {"compute_loss_func": scaled_by(scale)},
        lambda scale: {"compute_loss_func": functools.partial(scaled, scale=scale)},
        lambda scale: {"compute_loss_func": scaled_globally},
        lambda scale: {"cls": Scaling, "scale": scale},
        lambda scale: {"data_collator": lambda samples: transformers.default_data_collator(samples * scale)},
        lambda scale: {"train_dataset": sentences(16 * scale)},
    ],
    ids=["closure", "partial", "global", "attribute", "collator", "dataset"],
)
def test_other_values_that_a_trainer_holds_make_another_task(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)

    def digest(scale: int) -> str:
        monkeypatch.setitem(globals(), "SCALE", scale)
        return TaskSource.of(integration.task_of(trainer_of(tmp_path, **given(scale)))).script_digest()

    assert digest(1) == digest(1) != digest(2)
