"""A model is built without values where that can be done, and predicted as the same model built for real."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import TaskError
from autotune.prediction.fakes import Fakes
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import Traces, plan_traces
from autotune.task import Task
from autotune.task.batches import tensors
from autotune.techniques import find_techniques

complete = find_techniques().complete

HUGE = 2**40  # elements: 4 TiB
LARGE = 2**16  # elements: more than have values while a model is built


def with_own_initialisation() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        layer.weight.data.normal_(0, 0.02 / math.sqrt(8))
        with torch.no_grad():
            layer.bias.copy_(torch.linspace(0, 1, 32))
            layer.bias[3] = 1.0
    return model


class Tied(nn.Module):
    """Tied weights, a mask and positions as buffers, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 32)
        self.head = nn.Linear(32, 500, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 16, 16))
        self.register_buffer("positions", torch.arange(16).expand(1, -1), persistent=False)
        self.place = nn.Embedding(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words(torch.zeros(len(x), 16, dtype=torch.long)) + self.place(self.positions)
        scores = (words @ words.transpose(1, 2)).masked_fill(self.mask == 0, float("-inf"))
        return self.head(scores.softmax(-1) @ words)[:, 0, :32] + x


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 32)
    )


def with_weight_norm() -> nn.Module:
    layers = [torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)) for _ in range(3)]
    return nn.Sequential(*layers, torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)))


class Adapted(nn.Module):
    """A frozen layer beside a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def in_bf16() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).half().to(torch.bfloat16)


def moved() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).to(torch.device("cpu"), non_blocking=True)


def of_hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def loaded(folder: Path) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return model


KINDS = (with_own_initialisation, Tied, with_batch_norm, with_weight_norm, Adapted, in_bf16, moved, of_hugging_face)


def task(build_model: Any) -> Task:
    def make_batch(n: int) -> Any:
        if build_model is of_hugging_face or getattr(build_model, "of", None) is of_hugging_face:
            tokens = torch.randint(300, (n, 16))
            return {"input_ids": tokens, "labels": tokens}
        x = torch.randn(n, 32)
        return x, x

    def training_step(model: nn.Module, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            return model(**batch).loss
        kind = next(p.dtype for p in model.parameters() if p.requires_grad)
        return nn.functional.mse_loss(model(batch[0].to(kind)).float(), batch[1])

    return Task(build_model=build_model, make_batch=make_batch, training_step=training_step)


def traced(of: Task, target: str) -> Traces:
    found = Traces(target=target)
    configs = [complete({"batch_size": 4, **more}) for more in ({}, {"amp": "bf16"}, {"optimizer_impl": "for-loop"})]
    for message in trace_plan(of, plan_traces(configs, find_techniques()), target):
        if "traces" in message:
            found = found.merged(Traces.from_dict(message["traces"]))
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_model_without_values_is_predicted_as_one_that_was_built_for_real(kind: Any) -> None:
    def reads_values() -> nn.Module:
        assert bool(torch.ones(LARGE).sum() > 0)
        return kind()

    reads_values.of = kind
    fakes = Fakes(task(kind), "cuda", find_techniques())
    fakes.task.model()
    for_real = Fakes(task(reads_values), "cuda", find_techniques())
    for_real.task.model()
    assert (fakes.why_real, bool(for_real.why_real)) == ("", True)
    without, real = traced(task(kind), "cuda"), traced(task(reads_values), "cuda")
    assert without.failures == real.failures == {}
    for choices in ({}, {"amp": "bf16"}):
        for size in (2, 32, 1000):
            found, expected = (
                each.peak(complete({"batch_size": size, **choices}), find_techniques()) for each in (without, real)
            )
            assert found is not None and expected is not None
            assert found.breakdown == expected.breakdown
            assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.001)


def test_what_is_shared_stays_shared() -> None:
    fakes = Fakes(task(Tied), "cpu", find_techniques())
    built = fakes.task.model()
    assert built.head.weight is built.words.weight

    def reads_values() -> nn.Module:
        assert torch.ones(LARGE)[0].item() == 1
        return Tied()

    fakes = Fakes(task(reads_values), "cpu", find_techniques())
    for _ in range(2):
        built = fakes.task.model()
        assert built.head.weight is built.words.weight


@pytest.mark.parametrize(
    "read",
    [
        lambda: torch.ones(LARGE).mean().item(),
        lambda: torch.linspace(0, 0.1, LARGE).tolist(),
        lambda: torch.ones(LARGE).numpy(),
        lambda: bool(nn.Linear(LARGE, 4).weight.mean() > 0),
    ],
    ids=["item", "tolist", "numpy", "comparison"],
)
def test_where_the_constructor_reads_values_the_model_is_built_for_real_once_and_it_is_said_where(read: Any) -> None:
    num_built = []

    def build_model() -> nn.Module:
        read()
        num_built.append(1)
        return nn.Linear(32, 32)

    fakes = Fakes(task(build_model), "cpu", find_techniques())
    models = [fakes.task.model() for _ in range(3)]
    assert len(num_built) == 1 and len(set(map(id, models))) == 3
    assert "values of" in fakes.why_real and "(test_fakes.py, line " in fakes.why_real
    assert all(type(p.data).__name__ == "FakeTensor" for p in models[2].parameters())


class Dropped(nn.Module):
    """Reads what many constructors read of small tensors."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        assert rates == torch.linspace(0, 0.2, 3).tolist() == pytest.approx([0, 0.1, 0.2])
        steps = torch.zeros(4, dtype=torch.long)
        steps[1:].copy_(torch.arange(1, 4))
        steps.add_(1)
        assert int(steps.cumsum(0)[-1]) == 10 and bool((steps > 0).all())
        self.blocks = nn.ModuleList(nn.Dropout(rate) if rate > 0 else nn.Identity() for rate in rates)
        self.layer = nn.Linear(32, 32)
        with torch.no_grad():
            self.layer.bias.fill_(float(steps[0]))
        assert self.layer.bias.sum() == 32
        assert nn.init.constant_(torch.empty(3), 2.0).tolist() == [2.0, 2.0, 2.0]
        assert nn.init.trunc_normal_(torch.empty(100)).abs().max() <= 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(self.layer(x))
        return x


def test_values_of_small_tensors_can_be_read() -> None:
    fakes = Fakes(task(Dropped), "cpu", find_techniques())
    assert [type(block).__name__ for block in fakes.task.model().blocks] == ["Identity", "Dropout", "Dropout"]
    assert fakes.why_real == ""
    with fakes.run():  # where values that are read are plausible ones
        again = fakes.task.model()
    assert [getattr(block, "p", 0) for block in again.blocks] == pytest.approx([0, 0.1, 0.2])


def test_values_that_depend_on_unknown_ones_are_unknown() -> None:
    def build_model() -> nn.Module:
        few = torch.ones(4)
        view = few[:2]
        few.copy_(torch.randn(LARGE)[:4])
        assert abs(float(view[0])) < 100
        return nn.Linear(32, 32)

    fakes = Fakes(task(build_model), "cpu", find_techniques())
    fakes.task.model()
    assert "(test_fakes.py, line " in fakes.why_real


def test_weights_that_are_loaded_need_not_be_there_twice(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).state_dict(), tmp_path / "weights.pt")
    found = traced(task(lambda: loaded(tmp_path)), "cuda")
    assert found.failures == {} and found.peak(complete({"batch_size": 4}), find_techniques()) is not None


def test_a_model_that_no_host_can_hold_is_built_all_the_same() -> None:
    fakes = Fakes(task(lambda: nn.Linear(HUGE // 32, 32)), "cpu", find_techniques())
    assert sum(p.numel() for p in fakes.task.model().parameters()) == HUGE + 32


def test_what_the_host_cannot_hold_for_real_is_told_as_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model() -> nn.Module:
        assert torch.ones(LARGE).sum().item() > 0
        return nn.Linear(HUGE, 32)

    with pytest.raises(TaskError) as raised:
        Fakes(task(build_model), "cuda", find_techniques(), host_bytes=3 * 2**30).task.model()
    told = str(raised.value)
    assert "the host has too little memory" in told and "3.00 GiB" in told and "(test_fakes.py, line " in told
    assert "--memory-limit" not in told


def test_a_mistake_in_build_model_is_told_as_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        Fakes(task(lambda: 1 / 0), "cpu", find_techniques()).task.model()


def test_data_stay_real() -> None:
    fakes = Fakes(task(with_batch_norm), "cpu", find_techniques())
    assert all(type(tensor) is torch.Tensor for tensor in tensors(fakes.task.batch(2)))
