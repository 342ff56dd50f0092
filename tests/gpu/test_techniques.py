"""Techniques that only a GPU gains by, trained on one, in processes of their own. Skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.jobs import CheckJob, InspectJob
from autotune.runners.local import LocalRunner
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.techniques.device_prefetch import DevicePrefetch
from tests.devices.processes import in_process
from tests.gpu.test_cuda import require, require_compiler

techniques = find_techniques()

pytestmark = pytest.mark.gpu

GPT = Path(__file__).parent.parent.parent / "studies" / "gpt" / "model.py"
SETTINGS = ProbeSettings(memory_limit_bytes=8 * 2**30, max_timed_s=1.0, timeout_s=120)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: Any) -> Any:
    with LocalRunner(TaskSource.of(GPT), device="cuda:0", logs=tmp_path_factory.mktemp("logs")) as runner:
        yield runner


def run(runner: Any, **choices: Any) -> Any:
    if choices.get("amp") == "bf16":
        require((8, 0), "bf16")
    return runner.probe(techniques.complete({"batch_size": 12, **choices}, global_batch=48), SETTINGS)


@pytest.mark.parametrize("choice", ["flash", "efficient", "cudnn", "math"])
@pytest.mark.parametrize("partner", [{}, {"checkpoint_segments": 4}])
def test_every_attention_trains_in_bf16(runner: Any, choice: str, partner: dict[str, Any]) -> None:
    outcome = run(runner, attention=choice, amp="bf16", **partner)
    assert outcome.kind is Kind.OK, outcome


@pytest.mark.parametrize("choice", ["flash", "efficient", "cudnn"])
def test_the_preferred_attention_runs_from_the_first_step_on(choice: str) -> None:
    """torch settles its own order at its first choice on a GPU."""
    require((8, 0), "bf16")

    def operators() -> set[str]:
        session = prepare(GPT, {"batch_size": 2, "attention": choice, "amp": "bf16"}, device="cuda")
        with torch.profiler.profile() as profile:
            session.step(session.task.batch(2))
        return {event.key for event in profile.key_averages()}

    assert f"aten::_scaled_dot_product_{choice}_attention" in in_process(operators)


@pytest.mark.parametrize("choice", ["flash", "efficient", "cudnn", "math"])
def test_every_attention_is_exact(runner: Any, choice: str) -> None:
    check = runner.run(
        CheckJob(config=techniques.complete({"batch_size": 4, "attention": choice}), settings=SETTINGS, batch_size=4)
    )
    assert check.passed, check


def test_expandable_segments_train_within_the_limit(runner: Any) -> None:
    outside_bytes = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=120)).outside_bytes
    outcome = run(runner, expandable_segments=True)
    assert outcome.kind is Kind.OK, outcome
    assert outcome.measurement.peak_bytes <= SETTINGS.memory_limit_bytes
    config = techniques.complete({"batch_size": 48, "expandable_segments": True}, global_batch=48)
    small = runner.probe(config, SETTINGS.replace(memory_limit_bytes=outside_bytes + 256 * 2**20))
    assert small.kind is Kind.OOM, small


def test_expandable_segments_are_what_the_allocator_takes() -> None:
    def segments() -> list[bool]:
        task = Task(build_model=lambda: nn.Linear(8, 4), make_batch=lambda n: (torch.randn(n, 8), torch.ones(n, 4)))
        prepare(task, {"expandable_segments": True}, device="cuda")
        held = torch.empty(64 * 2**20, device="cuda")
        return [s["is_expandable"] for s in torch.cuda.memory_snapshot() if s["total_size"] >= held.nbytes]

    assert any(in_process(segments))


def test_cudnns_benchmark_trains_and_is_exact() -> None:
    from autotune.probe.checks import run_checks

    task = Task(
        build_model=lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)),
        make_batch=lambda n: (torch.randn(n, 3, 8, 8), torch.randint(0, 4, (n,))),
    )
    check = in_process(lambda: run_checks(task, {"cudnn_benchmark": True}, "cuda", batch_size=8))
    assert check.passed, check


@pytest.mark.values
def test_prefetched_batches_are_on_the_gpu_and_unchanged() -> None:
    def train() -> list[float]:
        samples = [(torch.full((256, 256), float(i)), i % 4) for i in range(32)]
        model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(256 * 256, 4))  # noqa: E731
        task = Task(build_model=model, train_dataset=lambda: samples)
        session = prepare(task, {"batch_size": 4, "device_prefetch": True}, device="cuda")
        seen = []
        for step in session.loader:
            (images, _) = step[0]
            assert images.is_cuda
            seen += images[:, 0, 0].tolist()
            session.step(step)
        return seen

    assert sorted(in_process(train)) == [float(i) for i in range(32)]


def test_a_search_on_a_gpu_has_them(runner: Any) -> None:
    support = runner.run(InspectJob(memory_limit_bytes=8 * 2**30, timeout_s=120)).support
    assert True in support["expandable_segments"].choices
    assert support["optimizer_impl"].choices == ("default", "for-loop", "fused")  # the task's own is foreach
    assert len(support["attention"].choices) > 1
    assert support[DevicePrefetch.name].reason  # no dataset


def test_gradients_are_not_held_where_the_update_is_in_the_backward_pass() -> None:
    def peak(on: bool) -> int:
        task = Task(
            build_model=lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))),
            make_batch=lambda n: (torch.randn(n, 2048), torch.randn(n, 2048)),
        )
        session = prepare(task, {"batch_size": 4, "optimizer_in_backward": on}, device="cuda")
        for _ in range(2):
            session.step(task.batch(4))
        torch.cuda.reset_peak_memory_stats()
        session.step(task.batch(4))
        return torch.cuda.max_memory_allocated()

    plain = in_process(peak, False)
    assert plain - in_process(peak, True) > 0.8 * 16 * 2048**2 * 4  # of the gradients


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_selective_checkpointing_lies_between_all_and_nothing(runner: Any, amp: str) -> None:
    configs = [{}, {"checkpoint_segments": 4, "checkpoint_policy": "selective"}, {"checkpoint_segments": 4}]
    outcomes = [run(runner, batch_size=48, amp=amp, **config) for config in configs]
    assert all(outcome.kind is Kind.OK for outcome in outcomes), outcomes
    held = [outcome.measurement.memory["allocated_bytes"] for outcome in outcomes]
    assert held[0] > held[1] > held[2]


def test_selective_checkpointing_is_exact(runner: Any) -> None:
    config = techniques.complete({"batch_size": 4, "checkpoint_segments": 4, "checkpoint_policy": "selective"})
    check = runner.run(CheckJob(config=config, settings=SETTINGS, batch_size=4))
    assert check.passed, check


TUNED = pytest.param("max-autotune-no-cudagraphs", marks=pytest.mark.values)  # by the time that kernels take


@pytest.mark.parametrize("choice", ["default", "reduce-overhead", TUNED])
@pytest.mark.parametrize("partner", [{}, {"amp": "bf16"}, {"checkpoint_segments": 4}, {"batch_size": 24}])
def test_compiled_blocks_train(runner: Any, choice: str, partner: dict[str, Any]) -> None:
    require_compiler()
    if choice == "reduce-overhead" and "checkpoint_segments" in partner:
        pytest.skip("the two are not combined, see `Compile.conflict`")
    if "amp" in partner:
        require((8, 0), "bf16")
    outcome = runner.probe(
        techniques.complete({"batch_size": 48, "compile": choice, **partner}, global_batch=48),
        SETTINGS.replace(timeout_s=580),
    )
    assert outcome.kind is Kind.OK, outcome


@pytest.mark.parametrize("choice", ["default", "reduce-overhead"])
def test_compiled_blocks_are_exact(runner: Any, choice: str) -> None:
    require_compiler()
    config = techniques.complete({"batch_size": 4, "compile": choice})
    check = runner.run(CheckJob(config=config, settings=SETTINGS.replace(timeout_s=300), batch_size=4))
    assert check.passed, check


def test_offloaded_activations_take_less_of_the_gpu(runner: Any) -> None:
    outcomes = [run(runner, batch_size=48, activation_offload=blocks) for blocks in (0, 4)]
    assert all(outcome.kind is Kind.OK for outcome in outcomes), outcomes
    held = [outcome.measurement.memory["allocated_bytes"] for outcome in outcomes]
    assert held[1] < 0.8 * held[0]


def test_offloading_is_exact(runner: Any) -> None:
    check = runner.run(
        CheckJob(
            config=techniques.complete({"batch_size": 4, "activation_offload": 4}), settings=SETTINGS, batch_size=4
        )
    )
    assert check.passed, check


@pytest.mark.values
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_scores_in_pieces_take_less_and_compute_the_same(amp: str) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(32000, 256), nn.Linear(256, 32000, bias=False)

        def forward(self, ids: Any) -> Any:
            return self.head(torch.tanh(self.tokens(ids)))

    task = Task(
        build_model=Language,
        make_batch=lambda n: (torch.randint(32000, (n, 512)), torch.randint(32000, (n, 512))),
        training_step=lambda model, batch: nn.functional.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].flatten()
        ),
    )
    if amp == "bf16":
        require((8, 0), "bf16")
    batch = task.batch(8)

    def train(on: bool) -> tuple[int, Any]:
        torch.manual_seed(0)
        session = prepare(task, {"batch_size": 8, "amp": amp, "loss_chunks": on}, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        session.accumulate(batch)
        gradient = torch.cat([p.grad.flatten() for p in session.model.parameters() if p.grad is not None])
        return torch.cuda.max_memory_allocated(), gradient.cpu().numpy()

    (plain_bytes, plain), (bytes_in_pieces, in_pieces) = in_process(train, False), in_process(train, True)
    assert bytes_in_pieces < 0.6 * plain_bytes
    assert plain @ in_pieces > 0.999 * np.linalg.norm(plain) * np.linalg.norm(in_pieces)


def test_the_backward_pass_on_a_gpu_shows_what_must_not_be_overwritten() -> None:
    def peak(on: bool) -> tuple[int, Any]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.LeakyReLU(), nn.BatchNorm2d(16), nn.LeakyReLU()]
        task = Task(
            build_model=lambda: nn.Sequential(*layers, nn.Conv2d(16, 4, 3)),
            make_batch=lambda n: (torch.randn(n, 16, 64, 64), torch.randn(n, 4, 62, 62)),
        )
        session = prepare(task, {"batch_size": 16, "inplace_activations": on}, device="cuda")
        assert [module.inplace for module in layers if isinstance(module, nn.LeakyReLU)] == [False, on]
        torch.cuda.reset_peak_memory_stats()
        session.accumulate(task.batch(16))
        gradient = torch.cat([p.grad.flatten() for p in session.model.parameters() if p.grad is not None])
        return torch.cuda.max_memory_allocated(), gradient.cpu().numpy()

    (plain_bytes, plain), (switched_bytes, switched) = in_process(peak, False), in_process(peak, True)
    assert plain_bytes - switched_bytes >= 16 * 16 * 64 * 64 * 4  # what the normalisation returns
    np.testing.assert_allclose(switched, plain, rtol=1e-3, atol=1e-6)


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(256))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x) / 16
        return x


def peak_and_movement(config: dict[str, Any]) -> tuple[int, torch.Tensor]:
    """The allocator's peak in the fourth step of 268 million weights, and how far they have moved by then."""
    task = Task(build_model=Residuals, make_batch=lambda n: (torch.randn(n, 1024), torch.randn(n, 1024)))
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 4, **config}, device="cuda")
    start = [p.detach().float().cpu() for p in session.model.parameters()]
    batch = task.batch(4)
    for _ in range(3):
        session.step(batch)
    torch.cuda.reset_peak_memory_stats()
    session.step(batch)
    peak_bytes = torch.cuda.max_memory_allocated()
    pairs = zip(session.model.parameters(), start, strict=True)
    return peak_bytes, torch.cat([(p.detach().float().cpu() - before).flatten() for p, before in pairs])


def compared(plain: dict[str, Any], other: dict[str, Any]) -> tuple[int, float]:
    """By how much the other config's peak is lower, and the cosine between the movements."""
    (plain_bytes, plain_movement), (other_bytes, other_movement) = peak_and_movement(plain), peak_and_movement(other)
    return plain_bytes - other_bytes, float(torch.cosine_similarity(plain_movement, other_movement, dim=0))


@pytest.mark.values
@pytest.mark.parametrize(
    ("config", "saved_bytes"),  # for each weight
    [
        ({"optimizer_state": "cpu"}, 8),
        ({"optimizer_state": "8bit"}, 5.9),
        ({"optimizer_state": "4bit"}, 6.9),
        ({"param_dtype": "bf16"}, 2),
        ({"param_dtype": "bf16", "optimizer_state": "8bit"}, 9.9),
        ({"param_dtype": "bf16", "optimizer_state": "cpu"}, 12),
    ],
)
def test_weights_gradients_and_state_take_less(config: dict[str, Any], saved_bytes: float) -> None:
    if config.get("optimizer_state") in ("8bit", "4bit"):
        pytest.importorskip("torchao")
        require_compiler()
    if config.get("param_dtype") == "bf16":
        require((8, 0), "bf16")
    saved, cosine = in_process(compared, {"optimizer_impl": "fused"}, config)
    assert saved > 0.8 * saved_bytes * 256 * 1024**2
    assert cosine > 0.7


def test_products_in_fp8_train_nearly_as_fp32() -> None:
    pytest.importorskip("torchao")
    require((8, 9), "arithmetic in fp8")
    assert in_process(compared, {}, {"param_dtype": "fp8"})[1] > 0.7
