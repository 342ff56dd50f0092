from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.cudagraph_trees import MarkStepBox

from autotune import prepare
from autotune.devices import base, open_device
from autotune.devices.targets import AbsentGpu
from autotune.records.device import DeviceInfo
from autotune.task import Task
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques import compile as module
from autotune.techniques.compile import Compile

from .kinds import KINDS
from .test_checkpoint_segments import Block, Listed

techniques = find_techniques()

ON = {"compile": "default"}


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without generating code, which takes minutes."""
    monkeypatch.setattr(module, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with techniques.keep_settings():
        yield


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), module._Compiled)]


def trained(task: Task, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 8, **config}, device="cpu")
    torch.manual_seed(1)
    session.accumulate(task.batch(8))
    return session


def test_blocks_that_repeat_are_compiled_once_for_all(make_task: Any) -> None:
    session = trained(make_task(Listed), ON)
    assert compiled(session.model) == [f"trunk.layers.{i}" for i in range(6)]
    assert num_graphs() == 2  # one more for the first block, whose input needs no gradient


def test_blocks_that_differ_are_compiled_each_however_many_there_are(make_task: Any) -> None:
    class Widening(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(x)))

    blocks = [Widening(2 + i // 2) for i in range(24)]
    session = trained(make_task(lambda: nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 4))), ON)
    assert len(compiled(session.model)) == 24
    assert num_graphs() == 13  # of 12 widths; one limit for all of them would be 8


def test_blocks_that_differ_in_a_plain_attribute_are_compiled_each(make_task: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.layer = number, nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return x + self.layer(x * (1 if self.number % 2 else 2 + self.number))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(*map(Scaled, [*range(12), 0])), nn.Linear(8, 4))

    plain, session = trained(make_task(made), {}), trained(make_task(made), ON)
    for expected, found in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)
    assert len(compiled(session.model)) == 13
    if hasattr(torch._dynamo.config, "allow_unspec_int_on_nn_module"):  # to torch 2.6 the number is a variable
        assert (
            num_graphs() == 13
        )  # block 0 twice, since its first input needs no gradient; one limit for all would be 8


def test_blocks_that_only_bear_different_numbers_share_a_compilation_and_the_limit_is_put_back(make_task: Any) -> None:
    def numbered(number: int) -> nn.Module:
        block = Block()
        block.layer_idx = number  # as Hugging Face models have it
        return block

    limit = torch._dynamo.config.cache_size_limit
    with techniques.keep_settings():
        trained(make_task(lambda: nn.Sequential(nn.Sequential(*map(numbered, range(6))), nn.Linear(8, 4))), ON)
        assert num_graphs() == 2 and torch._dynamo.config.cache_size_limit > limit
    assert torch._dynamo.config.cache_size_limit == limit


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole(make_task: Any) -> None:
    session = trained(make_task(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))), ON)
    assert compiled(session.model) == [""]
    assert num_graphs() == 1


class Coder(nn.Module):
    """Training calls its parts, and never itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh())
        self.decoder = nn.ModuleList([nn.Linear(8, 4)])

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.decoder[0](self.encoder(x)), y)


class LitCoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = nn.Linear(8, 4), nn.CrossEntropyLoss()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.criterion(self.net(batch[0]), batch[1])


def whole_step(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model.loss(*batch)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("build_model", "changes", "parts"),
    [
        (Coder, {"training_step": lambda model, batch: model.loss(*batch)}, ["encoder", "decoder.0"]),
        (Coder, {"train_step": whole_step}, ["encoder", "decoder.0"]),
        (LitCoder, {}, ["net"]),
    ],
    ids=["methods", "a whole step", "Lightning"],
)
def test_where_training_calls_parts_of_the_model_these_are_compiled(
    make_task: Any, build_model: Any, changes: Any, parts: list[str]
) -> None:
    task = make_task(
        build_model, configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), 0.1), **changes
    )
    plain, session = trained(task, {}), trained(task, ON)
    assert compiled(session.model) == parts == session.places["compile"]["modules"]
    assert num_graphs() == len(parts)
    for expected, found in zip(plain.model.state_dict().values(), session.model.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected)  # batch statistics, too: finding the parts out leaves nothing
    for parameter, other in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)


def test_where_training_calls_no_module_there_is_nothing_to_compile(
    make_task: Any, make_setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_no_compiler", lambda *what: "")
    task = make_task(
        lambda: nn.Linear(8, 4),
        training_step=lambda model, batch: nn.functional.cross_entropy(batch[0] @ model.weight.T, batch[1]),
    )
    with pytest.raises(UnsupportedError, match="compile=default: training calls no part"):
        prepare(task, ON, device="cpu")
    support = Compile().support(make_setting(task))
    assert not support.optional and "nothing to compile" in support.reason


@pytest.mark.parametrize("segments", [1, 3, 6])
def test_what_is_recomputed_is_the_compiled_block(make_task: Any, segments: int) -> None:
    config = {"checkpoint_segments": segments}
    plain, session = trained(make_task(Listed), config), trained(make_task(Listed), ON | config)
    for expected, found in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)
    assert num_graphs() >= 1


def test_batch_norm_statistics_are_updated_once(make_task: Any) -> None:
    def make() -> nn.Module:
        return Listed(lambda: Block(nn.BatchNorm1d))

    for config in ({}, {"checkpoint_segments": 6}):
        plain, session = trained(make_task(make), config), trained(make_task(make), ON | config)
        torch.testing.assert_close(list(session.model.buffers()), list(plain.model.buffers()), rtol=1e-5, atol=1e-7)


def test_gradients_in_the_memory_of_cuda_graphs_add_up_over_micro_batches(
    make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKEND", aot_autograd(fw_compiler=nop, bw_compiler=as_graphs_do))
    task = make_task(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    config = {"batch_size": 2, "accumulation_steps": 4}
    plain, told = trained(task, config), MarkStepBox.mark_step_counter
    session = trained(task, {**config, "compile": "reduce-overhead"})
    assert told - MarkStepBox.mark_step_counter >= 4, "each micro batch may overwrite what the one before gave"
    for expected, found in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)


def as_graphs_do(graph: Any, inputs: Any) -> Any:
    """A compiler whose code gives its results in the same memory each time."""
    held: dict[int, torch.Tensor] = {}

    def run(*inputs: Any) -> list[Any]:
        found = enumerate(graph(*inputs))
        return [v if v is None else held.setdefault(i, v.clone()).copy_(v).detach() for i, v in found]

    return make_boxed_func(run)


def test_names_and_evaluation_stay_and_a_deep_copy_computes_with_its_own_parameters(make_task: Any) -> None:
    session = trained(make_task(Listed), ON)
    assert list(session.model.state_dict()) == list(Listed().state_dict())
    average = copy.deepcopy(session.model)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.zero_()
    average.eval()
    assert average(torch.randn(2, 8)).abs().sum() > 0


def test_a_cpu_needs_a_compiler_and_pythons_headers(make_setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make_setting(KINDS["transformer"]())
    monkeypatch.setenv("CXX", "no-such-compiler")
    support = Compile().support(setting)
    assert "no-such-compiler" in support.reason and not support.optional
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(base.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert "/nowhere/Python.h" in Compile().support(setting).reason


def test_it_is_optional_for_its_price_which_grows_with_what_there_is_to_compile(
    make_setting: Any, make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_no_compiler", lambda *what: "")

    def price(task: Task) -> float:
        support = Compile().support(make_setting(task))
        assert support.choices == ("off",) and support.optional == ("default",)
        ((choice, seconds),) = support.setup_s
        assert choice == "default"
        return seconds

    repeated = price(make_task(Listed))
    assert price(make_task(lambda: Listed(depth=12))) == repeated
    assert price(make_task(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)), nn.Linear(8, 4)))) > repeated


@pytest.mark.parametrize("capability", [(6, 1), (9, 0)])
def test_a_gpu_needs_triton_and_a_c_compiler(
    make_setting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]
) -> None:
    info = DeviceInfo(name="cuda", model="a GPU", total_bytes=2**34, free_bytes=2**34, capability=capability)
    setting = make_setting(KINDS["transformer"](), device=AbsentGpu(info))
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    assert "triton" in Compile().support(setting).reason
    monkeypatch.setattr(base, "find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    found = {"clang": "/usr/bin/clang"}
    monkeypatch.setattr(base.shutil, "which", found.get)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(base.sysconfig, "get_paths", lambda: {"include": tmp_path})
    support = Compile().support(setting)
    assert len(support.optional) == (3 if capability >= (7, 0) else 0)
    found.clear()
    reason = Compile().support(setting).reason
    assert ("no gcc or clang" in reason) == (capability >= (7, 0))


def test_cuda_graphs_are_not_combined_with_checkpointing(make_task: Any) -> None:
    both = {"compile": "reduce-overhead", "checkpoint_segments": 2}
    assert Compile().is_redundant(techniques.complete(both))
    assert not Compile().is_redundant(techniques.complete({**both, "compile": "default"}))
    with pytest.raises(UnsupportedError, match="replay a CUDA graph"):
        prepare(make_task(Listed), both, device="cpu")


def test_selective_checkpointing_is_not_combined_with_it(make_task: Any) -> None:
    both = {**ON, "checkpoint_segments": 2, "checkpoint_policy": "selective"}
    assert Compile().is_redundant(techniques.complete(both))
    with pytest.raises(UnsupportedError, match="selective"):
        prepare(make_task(Listed), both, device="cpu")


def test_a_search_gives_its_probe_the_time_to_compile() -> None:
    assert techniques.setup_s(techniques.complete({})) == 0
    assert techniques.setup_s(techniques.complete({**ON, "checkpoint_segments": 2})) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_generated_code_computes_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := open_device("cpu").why_not_compiled():
        pytest.skip(reason)
    monkeypatch.setattr(module, "BACKEND", "inductor")
    plain, session = (trained(KINDS[kind](), config) for config in ({}, ON))
    for expected, found in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense(), rtol=1e-4, atol=1e-5)


class Moving(nn.Module):
    """Changes in each pass a teacher, a queue and a count, and sets a buffer up by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.teacher = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(2, 4))
        self.register_buffer("mean", torch.zeros(8))
        self.passes, self.is_set_up = 0, False

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if not self.is_set_up:
            self.mean.copy_(x.mean(0))
            self.is_set_up = True
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layer.weight, 0.5)
        out: torch.Tensor = nn.functional.dropout(self.layer(x - self.mean))
        self.queue = torch.cat([out.detach(), self.queue])[:2]
        self.passes += 1
        return nn.functional.cross_entropy(out, y)


def test_the_pass_that_tells_what_training_calls_leaves_nothing_behind() -> None:
    task = Task(
        build_model=Moving,
        make_batch=lambda n: (torch.randn(n, 8), torch.randint(0, 4, (n,))),
        training_step=lambda model, batch: model.loss(batch),
    )
    models, draws = [], []
    for config in ({}, ON):
        torch.manual_seed(0)
        models.append(prepare(task, {"batch_size": 8, **config}, device="cpu").model)
        draws.append(torch.rand(()))
    plain, with_it = models
    assert compiled(with_it) == ["layer"] and draws[0] == draws[1]
    for name, value in plain.state_dict().items():
        assert torch.equal(with_it.state_dict()[name], value), name
    assert (with_it.passes, with_it.is_set_up) == (0, False)
