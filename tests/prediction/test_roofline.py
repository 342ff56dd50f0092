"""The work of a model is counted in its trace, and a device's measured rates turn it into priors of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autotune.prediction.job import trace_plan
from autotune.prediction.memory import MemoryModel
from autotune.prediction.time import Roofline, TimeModel
from autotune.prediction.traces import Traces, plan_traces
from autotune.proposers.acquisition import Acquisition
from autotune.records.config import Choice, Config
from autotune.records.device import NOT_MEASURED, Calibration, Rate
from autotune.records.inspection import Support
from autotune.records.objective import Throughput
from autotune.records.outcome import Kind, Outcome
from autotune.space import Space, build_space
from autotune.task import Task
from autotune.task.unequal_samples import LengthDistribution
from autotune.techniques import Phase, Technique, Techniques, find_techniques
from autotune.techniques.build import Build, Setting
from tests.closed_form import inspection, measurement

TECHNIQUES = find_techniques()
complete = find_techniques().complete

ROWS, HIDDEN, SIZE = 6, 32, 8


def matrices(hidden: int = HIDDEN) -> Task:
    """Two linear layers on rows of 16 features."""
    return Task(
        build_model=lambda: torch.nn.Sequential(
            torch.nn.Linear(16, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 4), torch.nn.Flatten(0, 1)
        ),
        make_batch=lambda n: (torch.randn(n, ROWS, 16), torch.randint(0, 4, (n, ROWS)).flatten()),
    )


def images() -> Task:
    return Task(
        build_model=lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 64, 4)
        ),
        make_batch=lambda n: (torch.randn(n, 3, 8, 8), torch.randint(0, 4, (n,))),
    )


def traced(task: Task, **changes: object) -> Traces:
    found = Traces(target="cpu")
    plan = plan_traces(
        [complete({"batch_size": size, "accumulation_steps": 1, **changes}) for size in (2, SIZE)], find_techniques()
    )
    for message in trace_plan(task, plan, "cpu"):
        if "traces" in message:
            found = found.merged(Traces.from_dict(message["traces"]))
    return found


def rates(**gflops: tuple[float, float]) -> Calibration:
    """Matrix products and convolutions by type; 10 GB/s, 1 us to launch an operator."""
    kinds = ("matmul", "convolution")
    return Calibration(
        rates=tuple(
            Rate(work=kind, arithmetic=name, sizes=(64,), flops_per_s=(1e9 * rate,))
            for name, of in gflops.items()
            for kind, rate in zip(kinds, of, strict=True)
        ),
        bytes_per_s=1e10,
        launch_s=1e-6,
    )


def test_the_flops_of_matrix_products_are_those_of_the_layers() -> None:
    roofline = Roofline.of(rates(fp32=(1, 1)), traced(matrices()))
    assert roofline is not None
    # the first layer's input needs no gradient
    assert roofline.flops(SIZE) == pytest.approx(2 * ROWS * (2 * 16 * HIDDEN + 3 * HIDDEN * 4))


def test_convolutions_are_told_from_matrix_products() -> None:
    work = traced(images()).models[()].work
    assert work is not None
    per_sample = {(kind, arithmetic): slope for kind, arithmetic, _, slope in work.flops}
    assert per_sample["convolution", "fp32"] == pytest.approx(2 * 2 * 64 * 8 * 3 * 9)
    assert per_sample["matmul", "fp32"] == pytest.approx(3 * 2 * 8 * 64 * 4)


@pytest.mark.arithmetic
def test_a_trace_in_bf16_counts_its_products_in_bf16() -> None:
    traces = traced(matrices(), amp="bf16")
    group = (("amp", "bf16"),)
    if group not in traces.models:
        pytest.skip(f"not traced here: {traces.failures}")
    work = traces.models[group].work
    assert work is not None and {arithmetic for _, arithmetic, *_ in work.flops} == {"bf16"}


def test_a_recurrent_layers_products_are_counted() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(16, 16, batch_first=True)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layer(rows)[0].flatten(0, 1)

    task = replace(matrices(), build_model=Recurrent)
    roofline = Roofline.of(rates(fp32=(1, 1)), traced(task))
    assert roofline is not None
    assert roofline.flops(SIZE) == pytest.approx(3 * 2 * ROWS * 2 * 4 * 16 * 16, rel=0.4)


def test_without_rates_or_without_a_trace_there_is_no_roofline() -> None:
    traces = traced(matrices())
    assert Roofline.of(NOT_MEASURED, traces) is None
    assert Roofline.of(rates(fp32=(1, 1)), None) is None
    assert Roofline.of(rates(fp32=(1, 1)), Traces(target="cpu")) is None
    without = {(): replace(traces.models[()], work=None)}  # of an earlier version
    assert Roofline.of(rates(fp32=(1, 1)), replace(traces, models=without)) is None


def test_a_type_does_what_its_rates_say_for_the_kinds_of_work_that_the_model_does() -> None:
    calibration = rates(fp32=(1, 1), bf16=(4, 0.02))
    products, convolutions = (Roofline.of(calibration, traced(task)) for task in (matrices(), images()))
    assert products is not None and convolutions is not None
    faster, slower = products.factor(SIZE, "bf16"), convolutions.factor(SIZE, "bf16")
    assert faster is not None and slower is not None and faster < 0.8 and slower > 10
    assert products.factor(SIZE, "fp16") is None


def test_padding_up_to_the_widest_sample_is_no_work_of_the_others() -> None:
    traces = traced(matrices())
    plain, padded = (
        Roofline.of(rates(fp32=(1, 1)), replace(traces, lengths=lengths))
        for lengths in (None, LengthDistribution((10, 30, 100)))
    )
    assert plain is not None and padded is not None
    assert padded.flops(1) == pytest.approx(plain.flops(1) * (140 / 3) / 100)


def test_an_answer_is_as_far_from_the_limits_as_its_speed_and_the_rates_say() -> None:
    roofline = Roofline.of(rates(fp32=(2, 1), bf16=(8, 1)), traced(matrices()))
    assert roofline is not None
    plain = complete({"batch_size": SIZE, "accumulation_steps": 1})
    fast, short = (roofline.use(config, 1000.0, find_techniques()) for config in (plain, plain.replace(amp="bf16")))
    assert fast is not None and short is not None
    assert fast.flops_per_s == short.flops_per_s == pytest.approx(1000 * roofline.flops(SIZE))
    assert fast.flops_share == pytest.approx(fast.flops_per_s / 2e9)
    assert (short.arithmetic, short.flops_share) == ("bf16", pytest.approx(fast.flops_per_s / 8e9))
    assert fast.bandwidth_share == pytest.approx(fast.bytes_per_s / 1e10)
    assert fast.bytes_per_s > 1000 * 4 * ROWS * (16 + HIDDEN + 4)  # every tensor moves once at the least
    assert roofline.use(plain.replace(amp="fp16"), 1000.0, find_techniques()) is None


@pytest.fixture(scope="module")
def space() -> Space:
    return build_space(inspection(), find_techniques())[0]


def expected_ratio(model: TimeModel, config: Config, baseline: Config) -> float:
    fast, plain = model.estimate([config, baseline])
    return fast.samples_per_s / plain.samples_per_s


def test_before_any_probe_a_type_is_expected_to_do_what_was_measured(space: Space) -> None:
    traces = traced(matrices(1024))
    bf16 = space.complete({"amp": "bf16"})
    ratios = [
        expected_ratio(TimeModel(space, roofline=roofline), bf16, space.baseline)
        for roofline in (None, *(Roofline.of(rates(fp32=(1, 1), bf16=(rate, rate)), traces) for rate in (0.02, 3)))
    ]
    usual, emulated, native = ratios
    assert emulated < 0.1 < 1 < usual < native


def test_launching_and_updating_are_expected_to_take_what_operators_and_bytes_say(space: Space) -> None:
    traces = traced(matrices(1024))
    twice = space.complete({"batch_size": 2 * space.baseline.batch_size})
    calm, launching = (
        TimeModel(space, roofline=Roofline.of(replace(rates(fp32=(1, 1)), launch_s=launch_s), traces))
        for launch_s in (1e-9, 1e-4)
    )
    assert expected_ratio(calm, twice, space.baseline) < 1.1
    assert expected_ratio(launching, twice, space.baseline) > 1.4


def test_a_technique_that_says_nothing_of_its_effect_is_never_idle_whatever_a_step_spends_its_time_on() -> None:
    class Silent(Technique):
        name = "silent"
        summary = listed_choices = applies = ""
        off = False
        phase = Phase.MODEL

        def support(self, setting: Setting) -> Support:
            return Support(choices=(False, True))

        def apply(self, build: Build, choice: Choice) -> None:
            pass

    techniques = Techniques([*find_techniques().values(), Silent()])
    support = dict(inspection().support) | {"silent": Support(choices=(False, True))}
    space = build_space(inspection(support=support), techniques)[0]
    phases_s = {"data": 1e-6, "forward": 0.5, "backward": 0.5, "optimizer": 1e-6}
    measured = replace(measurement(space.baseline, space.baseline.samples_per_step, 2**29), phases_s=phases_s)
    probes = [(space.baseline, Outcome(kind=Kind.OK, measurement=measured))]
    for launch_s in (1e-12, 1.0):  # a second for each operator: nothing else counts
        calibration = replace(rates(fp32=(1, 1)), launch_s=launch_s)
        roofline = Roofline.of(calibration, traced(matrices()))
        acquisition = Acquisition(
            space,
            Throughput(memory_limit_bytes=2**34, headroom=0.05).with_baseline(probes[0][1]),
            TimeModel(space, probes, roofline=roofline),
            MemoryModel(None, 2**28, space, probes),
            probes,
        )
        assert not acquisition.is_idle(space.baseline, "silent")


def test_traces_that_were_kept_before_work_was_counted_still_open() -> None:
    data = traced(matrices()).to_dict()
    for _, trace in data["models"]:
        del trace["work"]
    for _, trace in data["updates"]:
        del trace["moved_bytes"], trace["num_operators"]
    assert Traces.from_dict(data).models[()].work is None
