"""A probe's run in this process: what it makes of warm-up steps, scalers, and micro batches without a label."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.devices import open_device
from autotune.probe import measure, passes, timing
from autotune.probe.compiler import num_graphs
from autotune.probe.finite import NonFiniteError
from autotune.probe.long_run import LongRun
from autotune.probe.measure import Run
from autotune.probe.passes import TooFewSamplesError
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.failure import outcome_of_failure
from autotune.session import prepare
from autotune.task import Task
from autotune.techniques import compile as techniques_compile
from autotune.techniques import find_techniques
from autotune.units import plural

techniques = find_techniques()

torch.set_num_threads(1)


def pairs(batch_size):
    return torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def task_of(**changes):
    return Task(**{"build_model": lambda: nn.Linear(6, 3), "make_batch": pairs, "configure_optimizers": sgd, **changes})


def run_of(task, config, **settings):
    device = open_device("cpu")
    settings = ProbeSettings(**{"memory_limit_bytes": None, "max_timed_s": 0.2, **settings})
    return Run(prepare(task, config, device=device), device, settings, lambda progress: None)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fp16_with_an_optimizer_without_state_is_measured(momentum):
    def configure(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    run = run_of(task_of(configure_optimizers=configure), {"batch_size": 4, "amp": "fp16"})
    assert run.measure(0.0).samples_per_s > 0
    assert run.num_steps > 3


def test_fp16_that_only_skips_steps_is_not_finite():
    def training_step(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).float() * float("inf"), batch[1])

    with pytest.raises(NonFiniteError):
        run_of(task_of(training_step=training_step), {"batch_size": 4, "amp": "fp16"}).measure(0.0)


@pytest.fixture
def now(monkeypatch):
    """The clock of the measurement, in seconds; it stands still unless it is set."""
    seconds = [0.0]
    for module in (measure, passes):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


@pytest.fixture
def clocked(now):
    """A task whose micro batches take 0.1 s and whose updates take 1 s, by the clock of the measurement alone."""

    class SlowUpdate(torch.optim.SGD):
        def step(self, closure=None):
            now[0] += 1.0
            return super().step(closure)

    def training_step(model, batch):
        now[0] += 0.1
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return task_of(
        training_step=training_step, configure_optimizers=lambda model: SlowUpdate(model.parameters(), lr=0.1)
    )


CONFIG = {"batch_size": 2, "accumulation_steps": 8}
TRUE_SPEED = 16 / (8 * 0.1 + 1.0)


def test_a_run_cut_short_tells_the_speed_of_whole_optimizer_steps(clocked):
    measured = run_of(clocked, CONFIG, slowest_samples_per_s=1e12).measure(0.0)
    assert measured.cut_short
    assert measured.samples_per_s == pytest.approx(TRUE_SPEED)
    assert measured.step_s == pytest.approx(1.8)
    assert measured.compile_s == pytest.approx(0.0, abs=1e-9)


def test_a_run_is_cut_short_by_the_speed_of_whole_optimizer_steps(clocked):
    measured = run_of(clocked, CONFIG, slowest_samples_per_s=0.5 * TRUE_SPEED).measure(0.0)
    assert not measured.cut_short
    assert measured.samples_per_s == pytest.approx(TRUE_SPEED)


@pytest.mark.parametrize(("phases", "num_steps"), [(True, 3), (False, 4)])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 8])
def test_of_long_micro_steps_the_last_of_the_warm_up_is_timed_and_a_probe_that_explores_is_warm_after_two(
    clocked, monkeypatch, accumulation_steps, phases, num_steps
):
    monkeypatch.setattr(measure, "LONG_S", 0.05)
    config = {"batch_size": 2, "accumulation_steps": accumulation_steps}
    measured = run_of(clocked, config, max_timed_s=0.5, phases=phases).measure(0.0)
    assert measured.samples_per_s == pytest.approx(2 * accumulation_steps / (0.1 * accumulation_steps + 1.0))
    assert len(measured.block_samples_per_s) == 2
    assert measured.num_steps == num_steps


@pytest.mark.parametrize(("slow_s", "num_steps"), [(0.12, 3), (0.2, 4), (1.0, 4)])
@pytest.mark.parametrize("has_dataset", [False, True])
def test_where_the_second_of_two_long_steps_was_slow_the_next_says_so_and_it_does_not_count(
    clocked, now, monkeypatch, slow_s, num_steps, has_dataset
):
    monkeypatch.setattr(measure, "LONG_S", 0.05)
    taken = []

    def training_step(model, batch):
        taken.append(batch)
        now[0] += slow_s if len(taken) <= 2 else 0.1  # micro batches of the first two steps; an update takes a second
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    samples = {"make_batch": None, "train_dataset": lambda: [(torch.ones(6), 0)] * 64} if has_dataset else {}
    slow = dataclasses.replace(clocked, training_step=training_step, **samples)
    measured = run_of(slow, {"batch_size": 2, "accumulation_steps": 1}, max_timed_s=0.5).measure(0.0)
    assert len(taken) == num_steps and len(measured.block_samples_per_s) == 2
    assert measured.samples_per_s == pytest.approx(2 / 1.1, rel=0.01)


def test_what_looks_hopeless_after_two_long_steps_takes_a_third_before_it_is_given_up(clocked, now, monkeypatch):
    monkeypatch.setattr(measure, "LONG_S", 0.05)
    taken = []

    def training_step(model, batch):
        taken.append(batch)
        now[0] += 9.0 if len(taken) <= 2 else 0.1
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    slow = dataclasses.replace(clocked, training_step=training_step)
    run = run_of(slow, {"batch_size": 2, "accumulation_steps": 1}, slowest_samples_per_s=0.3)
    assert not run.measure(0.0).cut_short and len(run.warm_steps) >= 3


def test_a_gradient_that_is_not_finite_is_seen_in_two_long_steps(clocked, monkeypatch):
    monkeypatch.setattr(measure, "LONG_S", 0.05)

    seen = []

    def training_step(model, batch):
        seen.append(batch)
        if len(seen) == 2:
            model.weight.register_hook(lambda grad: grad * float("nan"))
        return clocked.training_step(model, batch)

    broken = dataclasses.replace(clocked, training_step=training_step)
    with pytest.raises(NonFiniteError, match="gradient of weight was not finite at optimizer step 2"):
        run_of(broken, {"batch_size": 2}, max_timed_s=0.5).measure(0.0)


def test_samples_that_differ_take_a_third_long_step_because_the_second_takes_the_widest(monkeypatch):
    monkeypatch.setattr(measure, "LONG_S", 0.0)
    task = task_of(
        train_dataset=lambda: [(torch.randn(9 if n == 7 else 2, 6), 0) for n in range(64)],
        make_batch=None,
        training_step=lambda model, batch: model(batch[0]).square().mean(),
    )
    torch.manual_seed(0)  # the sample that is drawn for the first step is not the widest
    run = run_of(task, {"batch_size": 1}, max_timed_s=0.05)
    run.warm_up()
    assert len(run.warm_steps) >= 3


def test_nothing_of_the_warm_up_counts_where_something_is_watched_for_some_seconds(clocked, monkeypatch):
    monkeypatch.setattr(measure, "LONG_S", 0.05)
    measured = run_of(clocked, CONFIG, max_timed_s=2.0, min_timed_s=2.0).measure(0.0)
    assert measured.timed_s >= 2.0 and len(measured.block_samples_per_s) == measured.num_steps - 3


@pytest.mark.parametrize("long_s", [measure.LONG_S, 0.05])
@pytest.mark.parametrize("cut_short", [False, True])
def test_a_part_of_an_accumulating_step_adds_to_gradients_that_are_there(clocked, now, monkeypatch, long_s, cut_short):
    def training_step(model, batch):
        now[0] += 0.1 if model.weight.grad is None else 0.2
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    monkeypatch.setattr(measure, "LONG_S", long_s)
    clocked = dataclasses.replace(clocked, training_step=training_step)
    settings = {"slowest_samples_per_s": 1e12} if cut_short else {}
    measured = run_of(clocked, CONFIG, max_timed_s=5.0, **settings).measure(0.0)
    assert measured.step_s == pytest.approx(8 * 0.2 + 1.0)
    assert measured.growth_bytes_per_step == 0


def test_a_sparse_gradient_is_made_anew_for_each_part_of_a_step(monkeypatch):
    """To add to one makes it longer, which would look like a leak."""
    monkeypatch.setattr(measure, "SLICE_ABOVE_S", 0.0)
    monkeypatch.setattr(timing, "MIN_BLOCK_S", 1e-6)
    lengths = []

    def training_step(model, batch):
        grad = model[0].weight.grad
        lengths.append(0 if grad is None else grad._nnz())
        return model(batch).square().mean()

    task = task_of(
        build_model=lambda: nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Linear(4, 2)),
        make_batch=lambda n: torch.zeros(n, dtype=torch.long),
        training_step=training_step,
    )
    run_of(task, {"batch_size": 2, "accumulation_steps": 8}, max_timed_s=0.05, phases=False).measure(0.0)
    assert lengths[-6:] == [0] * 6


def test_a_step_is_timed_by_its_parts_where_whole_steps_would_take_more_samples_than_asked_for(clocked, monkeypatch):
    monkeypatch.setattr(measure, "SLICE_ABOVE_S", 10.0)
    whole, parts = (run_of(clocked, CONFIG, num_samples=number, max_timed_s=60.0).measure(0.0) for number in (96, 20))
    assert len(whole.block_samples_per_s) == 6
    assert len(parts.block_samples_per_s) == 20 / 2
    assert [parts.samples_per_s, whole.samples_per_s] == pytest.approx([TRUE_SPEED, TRUE_SPEED])


def test_phases_of_a_micro_batch_unlike_others_are_told_in_proportion_to_a_step():
    phases_s = {"data": 0.1, "forward": 0.1, "backward": 0.2, "optimizer": 0.1}
    told = measure._in_proportion(phases_s, 0.9)
    assert told == pytest.approx({"data": 0.2, "forward": 0.2, "backward": 0.4, "optimizer": 0.1})
    assert measure._in_proportion(phases_s, 0.05) == phases_s, "no less than the update alone"
    assert measure._in_proportion({}, 1.0) == {}


def test_a_long_micro_step_is_split_by_phase_while_it_is_timed(clocked, monkeypatch):
    monkeypatch.setattr(measure, "LONG_S", 0.05)
    measured = run_of(clocked, CONFIG).measure(0.0)
    assert measured.explained_s == 0 and measured.samples_per_s == pytest.approx(TRUE_SPEED)
    assert measured.phases_s == pytest.approx({"data": 0.0, "forward": 0.8, "backward": 0.0, "optimizer": 1.0})
    assert measured.block_samples_per_s == pytest.approx([TRUE_SPEED] * len(measured.block_samples_per_s))


class HalfLabelled(torch.utils.data.Dataset):
    """Every other sample has no label that counts."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randn(6), -100 if index % 2 else index % 3


@pytest.mark.parametrize("masked_mean", [False, True])
@pytest.mark.parametrize("slices_above_s", [measure.SLICE_ABOVE_S, 0.0])
def test_micro_batches_without_a_label_do_not_make_an_accumulating_config_nonfinite(
    monkeypatch, masked_mean, slices_above_s
):
    def training_step(model, batch):
        counts = batch[1] != -100
        each = nn.functional.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
        return (each * counts).sum() / counts.sum()  # with no label 0 / 0, and NaN in every gradient

    monkeypatch.setattr(measure, "SLICE_ABOVE_S", slices_above_s)
    monkeypatch.setattr(measure, "LONG_S", slices_above_s)
    monkeypatch.setattr(timing, "MIN_BLOCK_S", 1e-6)
    own = {
        "training_step": training_step,
        "loss_weight": lambda batch: float((batch[1] != -100).sum()),
    }
    task = task_of(make_batch=None, train_dataset=HalfLabelled, **(own if masked_mean else {}))
    task.use_widest([1, 3, 5, 0])
    run = run_of(task, {"batch_size": 1, "accumulation_steps": 16})
    measured = run.measure(0.0)
    assert measured.samples_per_s > 0
    assert 0 < measured.final_loss < 100


def test_a_stream_that_gives_no_batch_as_large_is_an_error_of_its_own():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(6), 1)] * 5)

    with pytest.raises(TooFewSamplesError, match="gives no batch of 8 samples") as raised:
        run_of(task_of(make_batch=None, train_dataset=Stream), {"batch_size": 8}).measure(0.0)
    outcome = outcome_of_failure(raised.value, None, "warmup")
    assert outcome.kind is Kind.ERROR and outcome.too_few_samples


def test_a_whole_step_without_a_label_is_not_finite():
    task = task_of(make_batch=lambda n: (torch.randn(n, 6), torch.full((n,), -100)))
    with pytest.raises(NonFiniteError):
        run_of(task, {"batch_size": 4}).measure(0.0)


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_the_widest_batch_is_trained_beside_the_optimizers_state(accumulation_steps):
    samples = [torch.ones(40 if number == 7 else 2, 6) for number in range(16)]
    task = task_of(
        make_batch=None,
        train_dataset=lambda: samples,
        collate_fn=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        training_step=lambda model, batch: model(batch).mean(),
        configure_optimizers=lambda model: torch.optim.AdamW(model.parameters()),
    )
    torch.manual_seed(0)  # the sample that is drawn for the first step is not the widest
    run = run_of(task, {"batch_size": 1, "accumulation_steps": accumulation_steps}, slowest_samples_per_s=1e12)
    accumulate, seen = run.session.accumulate, []

    def recorded(batch):
        has_gradients = all(parameter.grad is not None for parameter in run.session.model.parameters())
        seen.append((bool(run.session.optimizer.state), has_gradients, [micro.shape[1] for micro in batch]))
        return accumulate(batch)

    run.session.accumulate = recorded
    measured = run.measure(0.0)
    assert (True, accumulation_steps > 1, [40]) in seen
    assert measured.num_steps == run.num_steps


@pytest.mark.parametrize("accumulation_steps", [2, 4, 16])
def test_the_peak_of_accumulating_has_activations_beside_the_gradients_and_the_optimizers_state(accumulation_steps):
    task = task_of(configure_optimizers=lambda model: torch.optim.AdamW(model.parameters()))
    run = run_of(task, {"batch_size": 1, "accumulation_steps": accumulation_steps}, slowest_samples_per_s=1e12)
    loss, beside = run.session.loss, []

    def recorded(batch):
        has_gradients = any(parameter.grad is not None for parameter in run.session.model.parameters())
        beside.append((has_gradients, bool(run.session.optimizer.state)))
        return loss(batch)

    run.session.loss = recorded
    assert run.measure(0.0).cut_short
    assert (True, True) in beside


class Seldom(nn.Module):
    """A second layer that the first pass leaves out."""

    def __init__(self):
        super().__init__()
        self.often, self.seldom, self.num_passes = nn.Embedding(16, 4), nn.Linear(4, 4), 0

    def forward(self, words):
        self.num_passes += 1
        return self.often(words) if self.num_passes == 1 else self.seldom(self.often(words))


@pytest.mark.parametrize(
    "model",
    [lambda: nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Linear(4, 2)), Seldom],
    ids=["sparse", "seldom"],
)
def test_where_not_all_gradients_can_be_made_ahead_two_of_the_largest_batches_are_accumulated(model):
    task = task_of(
        build_model=model,
        make_batch=lambda n: torch.zeros(n, dtype=torch.long),
        training_step=lambda model, batch: model(batch).square().mean(),
    )
    run = run_of(task, {"batch_size": 1, "accumulation_steps": 4})
    run.warm_up()
    assert [step.num_micro for step in run.warm_steps[:3]] == [1, 2, 1]


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_where_the_peak_is_known_the_largest_batch_is_not_trained_again(monkeypatch, accumulation_steps):
    monkeypatch.setattr(Run, "_largest_batches", lambda run, count: pytest.fail("it is"))
    samples = [torch.ones(6) for _ in range(16)]
    task = task_of(
        make_batch=None, train_dataset=lambda: samples, training_step=lambda model, batch: model(batch).mean()
    )
    run = run_of(task, {"batch_size": 1, "accumulation_steps": accumulation_steps}, known_peak_bytes=2**50)
    assert run.measure(0.0).peak_bytes == 2**50


def trained_and_drawn(num_lengths, **settings):
    """How many micro batches a run with samples of so many lengths has trained, how many it has drawn, and how many it met first."""
    trained = []

    def training_step(model, batch):
        trained.append(batch.shape)
        assert batch.max() == 1
        batch.mul_(2)  # as code does that pops the labels off a batch
        return model.weight.sum() * batch.mean()

    samples = [torch.ones(1).expand(1 + place % num_lengths) for place in range(4000)]
    task = task_of(make_batch=None, train_dataset=lambda: samples, training_step=training_step)
    known = {"known_peak_bytes": 2**50, "known_long_run_peak_bytes": 2**50}
    run = run_of(task, {"batch_size": 1}, phases=False, **known, **settings)
    run.measure(0.0)
    return len(trained), run._long_run.shapes._counts.total(), run._num_met


def test_a_micro_batch_of_a_shape_that_comes_again_and_again_is_trained_once_before_it_is_timed():
    trained, drawn, num_met = trained_and_drawn(12)
    assert 0 < num_met < 12 and trained == drawn + num_met


def test_where_it_is_known_that_shapes_come_again_they_are_met_from_the_first_step_on_whose_time_counts():
    trained, drawn, num_met = trained_and_drawn(12, shapes_recur=True)
    assert 8 < num_met < 12 and trained == drawn + num_met


def test_where_it_is_known_that_shapes_do_not_recur_a_few_that_do_by_chance_are_not_met():
    trained, drawn, num_met = trained_and_drawn(12, shapes_recur=False)
    assert num_met == 0 and trained == drawn


def test_shapes_that_never_come_again_are_timed_as_they_are():
    trained, drawn, num_met = trained_and_drawn(4000)
    assert num_met == 0 and trained == drawn


def test_where_so_many_steps_are_asked_for_no_other_micro_batch_is_trained():
    trained, drawn, num_met = trained_and_drawn(12, num_steps=20, shapes_recur=True)
    assert num_met == 0 and trained == drawn


def test_where_so_many_steps_are_asked_for_what_a_shape_takes_at_first_does_not_count(now):
    met = set()

    def training_step(model, batch):
        now[0] += 0.1 if batch.shape in met else 0.5
        met.add(batch.shape)
        return model.weight.sum() * batch.mean()

    samples = [torch.ones(1).expand(1 + place % 6) for place in range(600)]
    task = task_of(make_batch=None, train_dataset=lambda: samples, training_step=training_step)
    assert run_of(task, {"batch_size": 1}, num_steps=100).measure(0.0).samples_per_s == pytest.approx(10.0)


@pytest.mark.parametrize("spared", ["LONG_S", "surely_keep_up"])
def test_no_time_is_given_to_new_shapes_where_they_cost_little_or_data_workers_would_use_it(monkeypatch, spared):
    if spared == "LONG_S":
        monkeypatch.setattr(measure, "LONG_S", 0.0)
    else:
        monkeypatch.setattr(passes.MicroBatches, "surely_keep_up", lambda batches, micro_s: False)
    assert trained_and_drawn(12, shapes_recur=True)[2] == 0


def test_a_batch_that_training_changes_in_place_is_another_one_each_time():
    seen = []

    def training_step(model, batch):
        seen.append(float(batch.max()))
        batch.mul_(2)
        return model(batch).mean()

    task = task_of(make_batch=lambda size: torch.ones(size, 6), training_step=training_step)
    run_of(task, {"batch_size": 2, "accumulation_steps": 2}).measure(0.0)
    assert len(seen) > 20 and set(seen) == {1.0}


@pytest.mark.parametrize("config", [{"batch_size": 2}, {"batch_size": 2, "accumulation_steps": 16}])
def test_where_loading_takes_far_longer_than_training_a_probe_takes_no_longer_for_it(config):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, place):
            time.sleep(0.01)
            return torch.ones(6)

    task = task_of(make_batch=None, train_dataset=Slow, training_step=lambda model, batch: model(batch).mean())
    measured = run_of(task, config, max_timed_s=0.2, phases=False).measure(0.0)
    assert measured.timed_s < 2 and measured.samples_per_s < 100


def loaded_task(now, *, num_samples, load_s, step_s):
    """Each sample takes so long to load, and each micro step so long, by the clock of the measurement alone."""

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return num_samples

        def __getitem__(self, place):
            now[0] += load_s
            return torch.ones(6)

    def training_step(model, batch):
        now[0] += step_s
        return model(batch).mean()

    return task_of(make_batch=None, train_dataset=Slow, training_step=training_step)


def test_blocks_of_a_warm_up_count_with_the_time_of_loading(now):
    task = loaded_task(now, num_samples=400, load_s=0.5, step_s=1.0)
    measured = run_of(task, {"batch_size": 2}, max_timed_s=5.0, phases=False).measure(0.0)
    assert measured.block_samples_per_s == pytest.approx([1.0] * len(measured.block_samples_per_s))


def test_the_smaller_last_batch_of_a_pass_is_no_part_of_the_time(now):
    task = loaded_task(now, num_samples=7, load_s=0.1, step_s=0.4)  # one batch of 4, and 3 that are left
    measured = run_of(task, {"batch_size": 4}, max_timed_s=5.0, phases=False).measure(0.0)
    assert measured.samples_per_s == pytest.approx(4 / 0.8)


def test_where_it_is_known_what_a_long_run_holds_nothing_is_trained_to_find_it_out(monkeypatch):
    monkeypatch.setattr(LongRun, "growth", lambda *args: pytest.fail("it is"))
    samples = [torch.ones(6) for _ in range(16)]
    task = task_of(
        make_batch=None, train_dataset=lambda: samples, training_step=lambda model, batch: model(batch).mean()
    )
    run = run_of(task, {"batch_size": 1}, known_peak_bytes=2**50, known_long_run_peak_bytes=2**50 + 2**30)
    assert run.measure(0.0).long_run_growth_bytes == 2**30


def test_what_was_timed_has_to_do_when_the_time_out_is_near():
    endless = {"interval": 1e-9, "max_timed_s": 3600.0, "min_timed_s": 3600.0}
    measured = run_of(task_of(), {"batch_size": 4}, timeout_s=0.5, **endless).measure(0.0)
    assert measured.samples_per_s > 0 and not measured.cut_short


def test_where_nobody_asks_for_the_phases_of_a_step_no_step_is_taken_for_them():
    split, whole = (run_of(task_of(), {"batch_size": 4}, phases=phases).measure(0.0) for phases in (True, False))
    assert set(split.phases_s) == {"data", "forward", "backward", "optimizer"} and split.explained_s > 0
    assert whole.phases_s == {} and whole.explained_s == 0


@pytest.fixture
def traced_only(monkeypatch):
    """Compiled code is not generated, which takes minutes."""
    monkeypatch.setattr(techniques_compile, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with techniques.keep_settings():
        yield


class Widening(nn.Module):
    """Compiled anew where `num_passes` is another."""

    num_passes = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(self.num_passes):
            x = torch.tanh(self.layer(x))
        return x[:, :3]


def test_a_warm_up_step_that_compiles_is_no_slow_step(traced_only, monkeypatch, now):
    def training_step(model, batch):
        before = num_graphs()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        now[0] += 0.1 + 20.0 * (num_graphs() - before)
        for run in runs:  # none in the pass that finds out what to compile
            Widening.num_passes = 2 + (run.num_steps > 0)
        return loss

    runs = []
    monkeypatch.setattr(Widening, "num_passes", 1)
    task = task_of(build_model=Widening, training_step=training_step)
    runs.append(run := run_of(task, {"batch_size": 2, "compile": "default"}, max_warmup_s=5.0))
    measured = run.measure(0.0)
    assert measured.compile_s == pytest.approx(60.0)  # three graphs: of the first step, and of two later ones
    assert measured.num_recompilations == 2
    assert measured.samples_per_s == pytest.approx(2 / 0.1)
    assert len(run.warm_steps) == 5  # as many as settle, whatever compiling took


def test_graph_breaks_are_counted_and_told(traced_only):
    def forward(self, x):
        return self.layer(x)[:, :3] * float(x.sum() > -1e9)

    task = task_of(build_model=lambda: type("Breaking", (Widening,), {"forward": forward})())
    measured = run_of(task, {"batch_size": 2, "compile": "default"}).measure(0.0)
    assert measured.num_graph_breaks > 0 and measured.num_recompilations == 0
    assert measured.compile_trouble == f"{plural(measured.num_graph_breaks, 'graph break')}"
    assert run_of(task_of(), {"batch_size": 2}).measure(0.0).compile_trouble == ""
