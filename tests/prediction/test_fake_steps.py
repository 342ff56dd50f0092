"""Traced peaks against what torch's CPU allocator really held, and what tracing makes of unusual code."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.prediction.anatomy import anatomies
from autotune.prediction.fake_steps import TraceError, Tracer
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import Purpose, Traces, plan_traces
from autotune.records.config import Config
from autotune.task import Task, load_task
from autotune.techniques import Technique, find_techniques
from autotune.techniques.checkpoint_segments import CheckpointSegments
from tests.arithmetic import has_arithmetic, skip_without_arithmetic
from tests.prediction.real_memory import real_peak_bytes

techniques = find_techniques()

pytestmark = pytest.mark.arithmetic
MODELS = Path(__file__).parent / "models"
KINDS = ("transformer", "residual", "recurrent", "unet", "sparse", "partly_frozen")
SWITCHED = (
    {},
    {"batch_size": 2},  # accumulates
    {"amp": "bf16"},
    {"amp": "fp16"},
    {"checkpoint_segments": 2},
    {"checkpoint_segments": 1, "amp": "bf16", "batch_size": 4},
    {"channels_last": True},
    {"channels_last": True, "amp": "bf16"},
    {"optimizer_impl": "foreach"},
    {"optimizer_impl": "fused", "batch_size": 4},
)
CLOSE = 0.03  # relative
# oneDNN's scratchpads for short types are not modelled; the smaller the model, the more they are of it
CLOSE_SHORT = 0.08


def config(choices, *, global_batch=8) -> Config:
    return techniques.complete({"batch_size": global_batch, **choices}, global_batch=global_batch)


def traced(task: Task, configs: list[Config], target: str = "cpu", known: Traces | None = None) -> Traces:
    found = known or Traces(target=target)
    for message in trace_plan(task, plan_traces(configs, find_techniques()).without(found), target):
        if "traces" in message:
            found = found.merged(Traces.from_dict(message["traces"]))
    return found


@functools.cache
def model(kind: str) -> tuple[Task, Traces]:
    task = load_task(MODELS / f"{kind}.py")
    return task, traced(task, [config(choices) for choices in SWITCHED])


def impossible(kind: str, choices) -> bool:
    if "checkpoint_segments" in choices and kind == "recurrent":
        return True  # no blocks
    if choices.get("optimizer_impl") == "fused" and kind == "sparse":
        return True  # no sparse gradients
    return kind == "recurrent" and choices.get("amp") == "fp16"  # oneDNN trains no LSTM in fp16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choices", SWITCHED, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "plain")
def test_the_traced_peak_is_the_real_allocators(kind, choices):
    if impossible(kind, choices):
        pytest.skip("the model cannot be trained so")
    skip_without_arithmetic(choices.get("amp", "off"))
    task, traces = model(kind)
    wanted = config(choices)
    peak = traces.peak(wanted, find_techniques())
    assert peak is not None, traces.failures
    real_bytes = real_peak_bytes(task, wanted)
    close = CLOSE_SHORT if choices.get("amp") else CLOSE
    assert peak.peak_bytes == pytest.approx(real_bytes, rel=close)


def test_a_group_that_is_traced_later_is_as_if_traced_with_plain_training_which_runs_no_more(monkeypatch):
    task, plain, other = load_task(MODELS / "residual.py"), config({}), config({"channels_last": True})
    at_once, before = traced(task, [plain, other]), traced(task, [plain])
    run: list[Config] = []
    micro_steps = Tracer.micro_steps
    monkeypatch.setattr(
        Tracer, "micro_steps", lambda self, config, *a, **k: run.append(config) or micro_steps(self, config, *a, **k)
    )
    later = traced(task, [plain, other], known=before)
    assert [config["channels_last"] for config in run] == [True]
    assert (later.models, later.updates) == (at_once.models, at_once.updates)
    assert later.models[()].alone.deviation > 0


class Transposed(nn.Module):
    """Attention over other samples, as in `nn.TransformerEncoderLayer`, gives its linear layers no contiguous input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 4096), nn.Linear(4096, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # the peak is here, and not in a backward pass
            wide = self.wide(x.transpose(0, 1))
        return self.narrow(wide.mean(0))


def test_a_bias_is_added_in_place_where_the_input_is_not_contiguous():
    task = Task(
        build_model=Transposed,
        make_batch=lambda n: torch.randn(n, 32, 64),
        training_step=lambda model, x: model(x).square().mean(),
        global_batch=8,
    )
    real = real_peak_bytes(task, config({}))
    assert traced(task, [config({})]).peak(config({}), find_techniques()).peak_bytes == pytest.approx(real, rel=CLOSE)


def pick_rows(x: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(0, len(x), 2)]


def gather_columns(x: torch.Tensor) -> torch.Tensor:
    return x.gather(1, torch.zeros(len(x), 4, dtype=torch.int64))


def select_rows(x: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, torch.arange(0, len(x), 2))


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.max(1).values


@pytest.mark.parametrize("take", [pick_rows, gather_columns, select_rows, largest])
def test_the_gradient_of_what_is_taken_of_a_tensor_is_written_in_place(take):
    task = Task(
        build_model=lambda: nn.Linear(8, 65536),
        make_batch=lambda n: torch.randn(n, 8),
        training_step=lambda model, x: take(model(x)).square().mean(),
        global_batch=64,
    )
    real = real_peak_bytes(task, config({}, global_batch=64))
    peak = traced(task, [config({}, global_batch=64)]).peak(config({}, global_batch=64), find_techniques())
    assert peak.peak_bytes == pytest.approx(real, rel=CLOSE)


@pytest.mark.parametrize("kind", ["transformer", "unet"])
@pytest.mark.parametrize("batch_size", [3, 24])
def test_batch_sizes_that_were_not_traced_are_predicted_as_well(kind, batch_size):
    task, traces = model(kind)
    wanted = techniques.complete({"batch_size": batch_size, "accumulation_steps": 2})
    assert traces.peak(wanted, find_techniques()).peak_bytes == pytest.approx(real_peak_bytes(task, wanted), rel=CLOSE)


def test_the_parts_of_a_peak_add_up_to_it():
    for kind in KINDS:
        traces = model(kind)[1]
        peak = traces.peak(config({"batch_size": 2}), find_techniques())
        assert peak.breakdown.total_bytes == pytest.approx(peak.peak_bytes, abs=3)


def test_frozen_parameters_have_no_gradient_and_tied_ones_count_once():
    task, traces = model("partly_frozen")
    parts = traces.peak(config({"batch_size": 2}), find_techniques()).breakdown
    built = task.model()
    trainable = sum(p.numel() for p in built.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in built.parameters()) + sum(b.numel() for b in built.buffers())
    assert parts.parameters_bytes == 4 * everything
    assert parts.gradients_bytes == pytest.approx(4 * trainable, rel=0.001)
    assert parts.optimizer_bytes == pytest.approx(8 * trainable, rel=0.001)  # Adam's two moments


def test_the_modules_that_hold_most_activations_are_named():
    names = [name for name, _ in model("unet")[1].peak(config({}), find_techniques()).breakdown.modules]
    assert len(names) == 5
    assert {name.split(".")[0] for name in names} <= {"down", "join", "up", "", "head", "middle"}
    assert any(name.startswith(("down.0", "join.2")) for name in names)  # of the highest resolution


def deep(kind: str) -> Task:
    """Blocks in a `Sequential`, which is cut into segments, or in a list, of which some are recomputed."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 64)
            blocks = [
                nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
            ]
            self.blocks = (
                nn.Sequential(*map(Residual, blocks)) if kind == "sequential" else nn.ModuleList(map(Residual, blocks))
            )
            self.head = nn.Linear(64, 500)

        def forward(self, x):
            x = self.first(x)
            if kind == "sequential":
                return self.head(self.blocks(x))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Residual(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if kind == "list of blocks that keep no input":
                x = x * 2
            return x + self.inner(x)

    return Task(
        build_model=Deep,
        make_batch=lambda n: (torch.randn(n, 128, 32), torch.randint(500, (n, 128))),
        training_step=lambda model, batch: nn.functional.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].flatten()
        ),
    )


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["sequential", "list", "list of blocks that keep no input"])
def test_recomputed_segments_are_put_together_from_two_traces_as_if_traced(kind, target, monkeypatch):
    amps = ("off", "bf16") if target == "cuda" or has_arithmetic("bf16") else ("off",)  # what is emulated is not traced
    segments = [{"checkpoint_segments": n} for n in (1, 2, 5)]
    choices = [*segments, *({"checkpoint_segments": 2, "amp": amp} for amp in amps[1:])]
    wanted = [config(choice | {"batch_size": size}, global_batch=64) for choice in choices for size in (4, 64)]
    num_traced = []
    trace = Tracer.micro_steps
    monkeypatch.setattr(Tracer, "micro_steps", lambda *args, **kwargs: num_traced.append(1) or trace(*args, **kwargs))
    composed = traced(deep(kind), wanted, target)
    assert len(num_traced) == 2 * len(amps)
    monkeypatch.setattr(CheckpointSegments, "recomputation", Technique.recomputation)
    really = traced(deep(kind), wanted, target)
    for config_ in wanted:
        found, real = composed.peak(config_, find_techniques()), really.peak(config_, find_techniques())
        segment_bytes = 0 if target == "cpu" else 2 * 2**20  # what the caching allocator takes at once
        assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.001, abs=segment_bytes), config_
        assert found.volume_bytes == pytest.approx(real.volume_bytes, rel=0.02), config_


def test_types_of_the_same_size_share_a_trace():
    skip_without_arithmetic("bf16")
    skip_without_arithmetic("fp16")
    task, _ = model("transformer")
    found = traced(task, [config({"amp": "bf16"}), config({"amp": "fp16"})])
    assert found.peak(config({"amp": "fp16"}), find_techniques()) == found.peak(
        config({"amp": "bf16"}), find_techniques()
    )


def test_a_gradient_scaler_takes_its_step_so_that_the_optimizers_state_is_counted():
    task = load_task(MODELS / "transformer.py")
    tracer = Tracer(task, "cpu", find_techniques())
    plain, scaled = (tracer.updates(config(choices), 2) for choices in ({}, {"amp": "fp16"}))
    state = [
        sum(u.second.held[k] for k in u.second.held if u.second.purposes[k] is Purpose.OPTIMIZER)
        for u in (plain, scaled)
    ]
    assert state[0] == state[1] > 0


def test_layers_that_are_deep_copied_keep_their_parameters():
    def build():
        layer = nn.Linear(8, 8)
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))

    task = Task(build_model=build, make_batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)))
    steps = Tracer(task, "cpu", find_techniques()).micro_steps(config({}), 2, 3)
    parameters = [k for k in steps.alone[0].held if steps.alone[0].purposes[k] is Purpose.PARAMETERS]
    assert len(parameters) == 6


def test_a_model_whose_building_needs_values_is_built_for_real():
    def build():
        linear = nn.Linear(8, 8)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(torch.eye(8).numpy()))
        return linear

    task = Task(build_model=build, make_batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)))
    wanted = config({"batch_size": 4})
    peak = traced(task, [wanted]).peak(wanted, find_techniques())
    assert peak.peak_bytes == pytest.approx(real_peak_bytes(task, wanted), rel=0.02)


def test_a_dataset_that_is_indexed_while_training_is_no_hindrance():
    inputs = torch.randn(50, 8)

    def training_step(model, batch):
        return model(inputs[batch]).square().mean()

    task = Task(
        build_model=lambda: nn.Linear(8, 4),
        make_batch=lambda n: torch.randint(50, (n,)),
        training_step=training_step,
    )
    assert traced(task, [config({})]).failures == {}


class _Unpredictable(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = act

    def forward(self, x):
        return self.linear(self.act(x))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda x: x[x.nonzero()[:, 0]], "aten.nonzero.default"),
        (lambda x: torch.unique(x, dim=0), "depends on the values of a tensor"),
        (lambda x: torch.from_numpy(x.numpy() * 2), "numpy"),
        (
            lambda x: x.view(int((x.abs() >= 0).sum()) // 8, 8),
            "^without the values of tensors it raises RuntimeError: ",
        ),
    ],
    ids=["nonzero", "unique", "numpy", "number"],
)
def test_what_depends_on_values_cannot_be_traced_and_the_reason_is_one_line(act, why):
    task = Task(build_model=lambda: _Unpredictable(act), make_batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)))
    with pytest.raises(TraceError, match=why) as raised:
        Tracer(task, "cpu", find_techniques()).micro_steps(config({}), 2, 3)
    assert "\n" not in str(raised.value)


class AtMostEight(nn.Module):
    """A model that takes no larger micro batches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        if len(x) > 8:
            raise ValueError(f"at most 8 samples, not {len(x)}.")
        return self.linear(x)


def no_more_than_eight(n: int) -> torch.Tensor:
    if n > 8:
        raise ValueError("only 8 samples")
    return torch.randn(n, 8)


@pytest.mark.parametrize(
    ("build", "make_batch", "why"),
    [
        (
            AtMostEight,
            lambda n: torch.randn(n, 8),
            "with 16 samples at once, and not with 2, it raises ValueError: at most 8 samples, not 16",
        ),
        (
            lambda: nn.Linear(8, 4),
            no_more_than_eight,
            "a batch of 16 samples cannot be made: ValueError: only 8 samples",
        ),
    ],
    ids=["model", "batch"],
)
def test_what_only_large_batches_raise_is_not_said_to_be_for_want_of_values(build, make_batch, why):
    task = Task(build_model=build, make_batch=make_batch, training_step=lambda model, x: model(x).square().mean())
    with pytest.raises(TraceError) as raised:
        Tracer(task, "cpu", find_techniques()).micro_steps(config({}), 2, 16)
    assert str(raised.value) == why
    (told,) = anatomies(task, [config({"batch_size": 16}, global_batch=16)], "cpu", find_techniques())
    assert told == why


def test_tracing_leaves_torch_as_it_was():
    swap, step = torch.utils.swap_tensors, torch.amp.GradScaler._maybe_opt_step
    task, _ = model("transformer")
    Tracer(task, "cpu", find_techniques()).micro_steps(config({"amp": "fp16"}), 2, 3)
    assert torch.utils.swap_tensors is swap
    assert torch.amp.GradScaler._maybe_opt_step is step
    assert not torch.nn.modules.module._global_forward_hooks
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_tracing_for_a_gpu_counts_the_batch_on_the_device_and_reserves_whole_segments():
    task, _ = model("partly_frozen")
    found = Traces(target="cuda")
    wanted = config({"batch_size": 4})
    for message in trace_plan(task, plan_traces([wanted], find_techniques()), "cuda"):
        if "traces" in message:
            found = found.merged(Traces.from_dict(message["traces"]))
    assert found.failures == {}
    peak = found.peak(wanted, find_techniques())
    segments = peak.peak_bytes / (2 * 2**20)
    assert segments == pytest.approx(round(segments), abs=0.01)
    assert found.models[()].input_bytes == (0, 0)  # those on the host do not count


def test_a_batchs_copy_on_a_gpu_is_gone_once_its_other_layout_is_there():
    task = Task(
        build_model=lambda: nn.Conv2d(3, 8, 3, padding=1),
        make_batch=lambda n: torch.randn(n, 3, 64, 64),
        training_step=lambda model, x: model(x).square().mean(),
        global_batch=8,
    )
    chosen, image_bytes = config({"channels_last": True}), 8 * 3 * 64 * 64 * 4
    tracer = Tracer(task, "cuda 8.0 108", find_techniques())
    with tracer.run(chosen) as run:
        events = run.micro_step(8, run.inputs(tracer.batch(8))).events
    copied, laid_out, gone = [place for place, event in enumerate(events) if event.size_bytes == image_bytes][:3]
    assert gone == laid_out + 1, "it lived through the forward pass"
    assert (events[gone].allocates, events[gone].key) == (False, events[copied].key)


def test_a_dropout_on_a_gpu_makes_its_mask_before_its_output():
    task = Task(
        build_model=lambda: nn.Sequential(nn.Linear(8, 512), nn.Dropout(0.5)),
        make_batch=lambda n: torch.randn(n, 8),
        training_step=lambda model, x: model(x).square().mean(),
        global_batch=64,
    )
    tracer = Tracer(task, "cuda 8.0 108", find_techniques())
    with tracer.run(config({})) as run:
        events = run.micro_step(64, run.inputs(tracer.batch(64))).events
    sizes = [event.size_bytes for event in events if event.allocates]
    mask_bytes = 64 * 512
    assert sizes[: sizes.index(mask_bytes)].count(4 * mask_bytes) == 1  # the dropout's input
