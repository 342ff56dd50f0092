"""What a loop is made of is tuned in place, and the loop trains as a session would."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune.errors import TaskError
from autotune.integrations.loops import Tuned, _changed_loader, _fixed, _switch_on, task_of, tune
from autotune.session import prepare
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.techniques.frameworks import LOOP
from tests.arithmetic import needs_bf16_arithmetic
from tests.integrations.answers import known, run_as_printed, shown

TECHNIQUES = find_techniques()

pytestmark = pytest.mark.usefixtures("measured_once", "short_play_off")

CLASSES = 4


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, CLASSES)
    )


def dataset() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 3, 8, 8, generator=made), torch.randint(CLASSES, (64,), generator=made))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=16, **options)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def tuned(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Tuned:
    options = {"loader": loader(), "budget": "60s", "trials": 2, "listeners": (), **options}
    others = {*TECHNIQUES} - {*options.get("fix", {}), *options.get("baseline", {})}
    storage = f"sqlite:///{folder / 'loop.db'}"
    return tune(
        model,
        options.pop("loader"),
        torch.nn.CrossEntropyLoss(),
        optimizer,
        storage=storage,
        exclude=[*others],
        **options,
    )


@needs_bf16_arithmetic
def test_the_loop_takes_the_sessions_steps_with_its_own_model_and_optimizer(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model.eval()
    choices = {"amp": "bf16", "channels_last": True, "optimizer_impl": "fused"}
    given = loader()
    task = Task.from_loader(model, given, torch.nn.CrossEntropyLoss(), optimizer)
    session = prepare(task, {"batch_size": 16, **choices}, device="cpu")
    found = tuned(tmp_path, model, optimizer, loader=given, fix=choices)
    assert {name: found.result.config[name] for name in choices} == choices and found.loader is given
    assert not model.training and optimizer.param_groups[0]["fused"]
    model.train()
    for batch in given:
        trained(model, optimizer, batch)
        session.step(batch)
    for ours, theirs in zip(session.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert model(batch[0]).dtype == torch.float32


@needs_bf16_arithmetic
def test_a_model_in_the_middle_of_training_keeps_its_state_and_can_be_copied(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = next(iter(loader()))
    trained(model, optimizer, batch)
    plain, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    tuned(tmp_path, model, optimizer, fix={"amp": "bf16", "optimizer_impl": "fused"})
    torch.testing.assert_close(optimizer.state_dict()["state"], state)
    assert model.state_dict().keys() == plain.state_dict().keys()
    average = copy.deepcopy(model)
    with torch.no_grad():
        assert not torch.equal(model(batch[0]), plain(batch[0])), "bf16"
        average[3].weight.zero_()  # type: ignore[index]
        average[3].bias.zero_()  # type: ignore[index]
        assert not average(batch[0]).any() and model(batch[0]).any()


def test_batches_of_another_form_are_tuned_by_a_training_step_as_the_message_says(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = [{"image": image, "label": label} for image, label in dataset()]
    given = {"loader": DataLoader(rows, batch_size=16), "fix": {"channels_last": True}}
    with pytest.raises(TaskError, match=r"give None as the loss, and training_step=lambda model, batch: \.\.\."):
        tuned(tmp_path, model, optimizer, **given)

    def training_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])

    found = tuned(tmp_path, model, optimizer, training_step=training_step, **given)
    assert found.result.config["channels_last"]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    training_step(model, next(iter(given["loader"]))).backward()
    optimizer.step()


def test_the_loader_changes_in_what_the_answer_says_and_in_nothing_else(tmp_path: Path) -> None:
    model = net()
    sampler = torch.utils.data.SubsetRandomSampler(range(32))
    given = loader(sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = tuned(tmp_path, model, optimizer, loader=given, fix={"num_workers": 1}, budget="30s", probe_timeout="30s")
    made = found.loader
    assert made is not given and made.num_workers == 1 and made.prefetch_factor == 2
    assert made.sampler is sampler and made.drop_last and made.batch_size == 16 and made.dataset is given.dataset
    assert "forward" not in vars(model), "the model has nothing to change"
    assert len(list(made)) == 2


@needs_bf16_arithmetic
def test_a_loader_of_another_class_is_kept(tmp_path: Path) -> None:
    class Own(DataLoader[Any]):
        def __init__(self) -> None:
            super().__init__(dataset(), batch_size=16)

    model, given = net(), Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = tuned(tmp_path, model, optimizer, loader=given, fix={"amp": "bf16"})
    assert found.loader is given and "forward" in vars(model)


def test_what_the_loop_does_itself_is_searched_around_and_not_done_twice(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = tuned(tmp_path, model, optimizer, baseline={"amp": "bf16", "accumulation_steps": 2}, trials=1)
    assert found.result.config["amp"] == "bf16" and found.result.config["accumulation_steps"] == 2
    assert "forward" not in vars(model)


@needs_bf16_arithmetic
def test_an_accelerator_says_what_it_does(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for precision, switched_on in (("bf16", False), ("no", True)):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = tuned(tmp_path / precision, model, optimizer, fix={"amp": "bf16"}, trials=2)
        assert found.result.config["amp"] == "bf16" and ("forward" in vars(model)) == switched_on
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@needs_bf16_arithmetic
def test_a_model_that_was_tuned_is_not_tuned_again(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuned(tmp_path, model, optimizer, fix={"amp": "bf16"})
    with pytest.raises(TaskError, match="was tuned before"):
        tuned(tmp_path, model, optimizer)


def test_a_lightning_module_is_for_its_trainer() -> None:
    lightning = pytest.importorskip("lightning")
    module = lightning.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    with pytest.raises(TaskError, match=r"integrations\.lightning\.tune"):
        tune(module, loader(), None, torch.optim.SGD(module.parameters(), lr=0.1))


def test_a_loader_that_the_loop_keeps_is_not_compared_with_a_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    class SearchedError(Exception):
        pass

    told = []

    def search(task: Task, *_: Any, **__: Any) -> None:
        told.extend(task.warnings)
        raise SearchedError

    monkeypatch.setattr("autotune.integrations.loops.search", search)
    model, given = net(), loader(drop_last=True, worker_init_fn=print)
    with pytest.raises(SearchedError):
        tune(model, given, None, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not told and Task.from_loader(model, given).warnings


def test_what_would_need_another_loop_is_not_for_it() -> None:
    assert TECHNIQUES["amp"].write(LOOP, "fp16") is None and TECHNIQUES["amp"].write(LOOP, "bf16") == {}
    assert TECHNIQUES["optimizer_in_backward"].write(LOOP, True) is None
    assert TECHNIQUES["optimizer_impl"].write(LOOP, "fused", optimizer="SGD") == {}


def switched_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **found: Any) -> None:
    _switch_on(found, task_of(model, loader(), torch.nn.CrossEntropyLoss(), optimizer), model, optimizer, "cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    ],
)
def test_another_layout_in_the_middle_of_training_is_that_of_the_optimizers_state(make: Any) -> None:
    models = [net(), net()]
    optimizers = [make(model.parameters()) for model in models]
    batches = list(loader())
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, optimizer, batches[0])
    fused = {} if optimizers[0].param_groups[0]["fused"] else {"optimizer_impl": "fused"}
    switched_on(models[0], optimizers[0], channels_last=True, **fused)
    for batch in batches[1:]:
        for model, optimizer in zip(models, optimizers, strict=True):
            trained(model, optimizer, batch)
    for ours, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_a_loop_that_accumulates_is_prepared_where_lightning_is_imported_too() -> None:
    """Its model, whose loss may be its own, is the one that is there: it is not built to find out what it is."""
    pytest.importorskip("lightning.pytorch")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = task_of(model, loader(), None, optimizer, baseline={"accumulation_steps": 2})
    _switch_on({"amp": "bf16"}, task, model, optimizer, "cpu")
    assert "forward" in vars(model)


def test_an_optimizer_that_nothing_changes_keeps_its_own_state() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer, next(iter(loader())))
    state = {parameter: kept["momentum_buffer"].double() for parameter, kept in optimizer.state.items()}
    for parameter, kept in optimizer.state.items():
        kept["momentum_buffer"] = state[parameter]
    groups = optimizer.param_groups
    switched_on(model, optimizer, amp="bf16")
    assert optimizer.param_groups is groups
    assert all(kept["momentum_buffer"] is state[parameter] for parameter, kept in optimizer.state.items())


def test_what_is_switched_on_for_the_process_of_a_loop_stays_when_a_session_is_prepared_beside_it() -> None:
    with TECHNIQUES.keep_settings():
        model = net()
        switched_on(model, torch.optim.SGD(model.parameters(), lr=0.1), matmul_precision="tf32")
        prepare(Task(build_model=net, make_batch=lambda n: torch.randn(n, 3, 8, 8)), {}, device="cpu")
        assert torch.get_float32_matmul_precision() == "high"


def test_each_module_keeps_its_mode() -> None:
    model = torch.nn.Sequential(*net().children(), torch.nn.BatchNorm1d(CLASSES))
    model.train()
    model[4].eval()
    switched_on(model, torch.optim.SGD(model.parameters(), lr=0.1), amp="bf16")
    assert model.training and model[3].training and not model[4].training


def test_tensors_stay_on_the_loops_devices() -> None:
    model = net()
    switched_on(model, torch.optim.SGD(model.parameters(), lr=0.1), channels_last=True)
    assert model.to("meta")(torch.empty(2, 3, 8, 8, device="meta")).device.type == "meta"


def test_a_forward_without_anything_around_it_stays_and_one_with_it_compiles_whole() -> None:
    model = net()
    switched_on(model, torch.optim.SGD(model.parameters(), lr=0.1), optimizer_impl="fused")
    assert "forward" not in vars(model)
    switched_on(model, torch.optim.SGD(model.parameters(), lr=0.1), amp="bf16", channels_last=True)
    found = torch._dynamo.explain(model)(torch.randn(2, 3, 8, 8))
    assert found.graph_count == 1 and found.op_count > 3, found.break_reasons
    torch._dynamo.reset()


def test_a_model_can_be_wrapped_and_unwrapped_by_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switched_on(model, optimizer, channels_last=True)
    prepared = accelerator.prepare(model)
    batch = torch.randn(2, 3, 8, 8)
    assert prepared(batch).shape == (2, CLASSES)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(batch).shape == (2, CLASSES)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loader_drops_the_options_that_the_answers_exclude() -> None:
    alone = _changed_loader(
        loader(num_workers=2, prefetch_factor=2, persistent_workers=True, timeout=9, multiprocessing_context="fork"),
        {"num_workers": 0},
    )
    assert len(list(alone)) == 4

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(dataset())

    streamed = _changed_loader(DataLoader(Stream(), batch_size=16), {"num_workers": 1})
    assert streamed.num_workers == 1 and len(list(streamed)) == 4


@pytest.mark.parametrize("said", [{"prefetch_factor": 4}, {"persistent_workers": True}])
def test_a_loader_with_one_other_option_of_its_workers_keeps_all_else(said: dict[str, Any]) -> None:
    given = loader(shuffle=True, num_workers=2, drop_last=True)
    made = _changed_loader(given, said)
    assert {name: getattr(made, name) for name in said} == said
    assert (made.batch_size, made.sampler, made.num_workers, made.drop_last) == (16, given.sampler, 2, True)


def test_what_accelerate_launch_says_is_what_the_loop_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = net()
    found = tuned(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), trials=1)
    assert found.result.baseline.config["amp"] == "bf16" and "forward" not in vars(model)


@pytest.mark.parametrize("names", [{"baseline"}, {"training_step", "baseline"}], ids=["loss", "training_step"])
def test_the_lines_that_are_printed_after_a_search_run_what_was_measured(names: set[str], tmp_path: Path) -> None:
    def training_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def made() -> dict[str, Any]:
        model = net()
        own = {"training_step": training_step, "loss": None} if "training_step" in names else {}
        return {
            "model": model,
            "loader": DataLoader(dataset(), batch_size=4),
            "loss": torch.nn.CrossEntropyLoss(),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            **own,
        }

    tune(**made(), baseline={"accumulation_steps": 24}, fix={"batch_size": 4}, **known(tmp_path))
    assert run_as_printed(shown(tmp_path), **made()).config.samples_per_step == 96


def test_a_loop_that_does_what_the_user_excludes_or_fixes_otherwise() -> None:
    assert _fixed({"amp": "bf16"}, {}, ["amp"]) == {}
    assert _fixed({"amp": "bf16"}, {"channels_last": True}, []) == {"amp": "bf16", "channels_last": True}
    with pytest.raises(TaskError, match=r"'amp': 'off'.*the loop itself has 'bf16'"):
        _fixed({"amp": "bf16"}, {"amp": "off"}, [])


def test_what_is_no_model_or_optimizer_is_said_before_the_search() -> None:
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TaskError, match=r"expected a torch\.nn\.Module"):
        tune("model", loader(), None, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="the optimizer is None"):
        tune(model, loader(), None, None)  # type: ignore[arg-type]
