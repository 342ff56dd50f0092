"""Which micro batches a run takes, and what it costs to begin a pass over the training set."""

import multiprocessing
import time
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from autotune.devices import open_device
from autotune.probe import measure, passes
from autotune.probe.evaluation import EvaluationRun
from autotune.probe.measure import Run
from autotune.probe.passes import MicroBatches
from autotune.records.config import ProbeSettings
from autotune.session import prepare
from autotune.task import Task

torch.set_num_threads(1)
LOAD_S = 0.01
NUM_SAMPLES = 12


class Slow(Dataset):
    """Each sample takes 10 ms to load."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        time.sleep(LOAD_S)
        return torch.randn(6), index % 3


def training_step(model, batch):
    time.sleep(4 * LOAD_S)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


SLOW = Task(build_model=lambda: nn.Linear(6, 3), train_dataset=Slow, training_step=training_step)


def measured(config, **settings):
    device = open_device("cpu")
    session = prepare(SLOW, {"batch_size": 2, **config}, device=device)
    settings = ProbeSettings(**{"memory_limit_bytes": None, "max_timed_s": 0.2, **settings})
    return Run(session, device, settings, lambda progress: None).measure(0.0)


@pytest.mark.parametrize(("seconds", "prepared"), [(0.0, 4), (0.1, 4), (0.2, 2), (0.4, 1), (3.0, 1)])
def test_batches_that_take_long_to_make_are_prepared_in_small_numbers(monkeypatch, seconds, prepared):
    now, made = [0.0], []
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def micro_batches():
        while True:
            now[0] += seconds
            made.append(torch.ones(2))
            yield made[-1], 4

    session = SimpleNamespace(
        task=SimpleNamespace(dataset=lambda: None),
        loader=SimpleNamespace(micro_batches=micro_batches),
        device=torch.device("cpu"),
    )
    next(MicroBatches(session))
    assert len(made) == prepared


@pytest.mark.parametrize(("batch_bytes", "prepared"), [(24, 4), (400 * 2**20, 2), (3 * 2**30, 1)])
def test_large_batches_are_prepared_in_small_numbers(monkeypatch, batch_bytes, prepared):
    made = []
    large = torch.empty(batch_bytes, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(passes, "tensors", lambda batch: [large])
    session = SimpleNamespace(
        task=SimpleNamespace(dataset=lambda: None),
        loader=SimpleNamespace(micro_batches=lambda: ((made.append(number), 4) for number in range(100))),
        device=torch.device("cpu"),
    )
    next(MicroBatches(session))
    assert made == list(range(prepared))


@pytest.mark.parametrize(("device", "where"), [("cuda", "page-locked"), ("cpu", "anywhere")])
def test_batches_for_a_gpu_lie_in_page_locked_memory(monkeypatch, device, where):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: "page-locked")
    monkeypatch.setattr(passes, "map_tensors", lambda change, micro: change(torch.ones(1)))
    session = SimpleNamespace(
        loader=SimpleNamespace(micro_batches=lambda: iter([("anywhere", 4)] * 9)), device=torch.device(device)
    )
    assert passes._prepare_batches(session) == [(where, 4)] * 4


def loader_of(num_samples, num_workers, passes_of_waits, now):
    """A loader of whose passes each batch is waited for as long as is given."""
    left = iter(passes_of_waits)

    def micro_batches():
        for seconds in next(left):
            now[0] += seconds
            yield None, 1

    return SimpleNamespace(micro_batches=micro_batches, num_samples=num_samples, num_workers=num_workers)


@pytest.fixture
def waited(monkeypatch):
    """Takes batches of passes whose waits are given, by a clock of its own."""
    now = [0.0]
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def take(waits, num_samples=100, num_workers=1):
        session = SimpleNamespace(
            task=SimpleNamespace(dataset=list),
            config=SimpleNamespace(batch_size=1),
            loader=loader_of(num_samples, num_workers, waits, now),
        )
        batches = MicroBatches(session)
        list(islice(batches, sum(map(len, waits))))
        return batches

    return take


def test_what_is_waited_at_the_start_of_a_later_pass_beyond_any_batch_is_told_apart(waited):
    batches = waited([[9.0, 0.1, 0.1], [0.5, 0.1], [0.7]])
    assert (batches.num_starts, batches.waited_s) == (2, pytest.approx(0.4 + 0.6))
    assert batches.start_wait_s(10.0, may_measure=False) == pytest.approx(0.5)


def test_where_training_itself_loads_no_pass_starts_with_a_wait(waited):
    batches = waited([[0.5, 0.1], [0.5]], num_workers=0)
    assert (batches.num_starts, batches.start_wait_s(10.0, may_measure=True)) == (0, 0.0)


@pytest.mark.parametrize(
    ("first_s", "samples_per_s", "may_measure"),
    [(1.0, 1.0, True), (1.0, 100.0, False), (3.0, 100.0, True)],
    ids=["nothing beside a pass", "no time for it", "too long"],
)
def test_what_is_not_worth_it_or_takes_too_long_is_not_measured(waited, first_s, samples_per_s, may_measure):
    """In a pass of 1000 samples."""
    batches = waited([[first_s, 0.1, 0.1]], num_samples=1000)
    batches._next_start_s = pytest.fail
    assert batches.start_wait_s(samples_per_s, may_measure=may_measure) == 0.0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_waited_for_most_batches_is_told(waited, num_workers):
    batches = waited([[5.0, 0.1, 0.3], [0.1]], num_workers=num_workers)
    assert batches.usual_wait_s == pytest.approx(0.2)


def test_data_workers_surely_keep_up_where_a_micro_step_takes_longer_than_the_first_batch_of_each(waited):
    assert [waited([[0.5, 0.1]], num_workers=2).surely_keep_up(micro_s) for micro_s in (0.2, 0.3)] == [False, True]
    assert waited([[0.5, 0.1]], num_workers=0).surely_keep_up(0.1)


def test_a_stream_has_no_pass_that_could_be_counted(waited):
    assert waited([[0.5, 0.1]], num_samples=None).start_wait_s(100.0, may_measure=True) == 0.0


def test_a_start_that_cannot_be_measured_counts_as_none(waited):
    batches = waited([[0.5, 0.1]])  # its loader makes no other
    assert batches.start_wait_s(100.0, may_measure=True) == 0.0


@pytest.mark.parametrize("persistent", [False, True])
def test_a_start_is_measured_where_none_falls_into_the_probe(persistent):
    """Two samples take 20 ms to load: at least as long is waited for the first batch. No worker is left."""
    choices = {"batch_size": 2, "num_workers": 1, "persistent_workers": persistent}
    others = {*multiprocessing.active_children()}  # of an earlier session; they may end meanwhile
    session = prepare(SLOW, choices, device=open_device("cpu"))
    batches = MicroBatches(session)
    for _ in range(3):
        next(batches)
        time.sleep(4 * LOAD_S)  # as long as a step takes, in which the worker loads
    workers = {*multiprocessing.active_children()} - others
    assert batches.start_wait_s(50.0, may_measure=True) > LOAD_S
    assert {*multiprocessing.active_children()} - others == workers


@pytest.mark.parametrize("choices", [{}, {"persistent_workers": True}, {"length_bucketing": True}])
def test_workers_wait_is_counted_in_a_probe(choices):
    assert measured({"num_workers": 1, **choices}).start_wait_s > 0


@pytest.mark.parametrize("settings", [{}, {"num_steps": 36}], ids=["two starts while timed", "six whole passes"])
def test_the_speed_is_that_of_whole_passes(monkeypatch, settings):
    """By a clock of its own: six steps of 40 ms in a pass, which starts with a wait of 200 ms."""
    now = [0.0]
    for module in (passes, measure):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def training_step(model, batch):
        now[0] += 0.04
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def micro_batches():
        now[0] += 0.2
        for _ in range(6):
            yield (torch.randn(2, 6), torch.tensor([0, 1])), 2

    samples = [(torch.randn(6), 0)] * NUM_SAMPLES
    task = Task(build_model=lambda: nn.Linear(6, 3), train_dataset=lambda: samples, training_step=training_step)
    device = open_device("cpu")
    session = prepare(task, {"batch_size": 2}, device=device)
    session.loader = SimpleNamespace(
        micro_batches=micro_batches, num_samples=NUM_SAMPLES, num_workers=1, begin_again=lambda seed: 0
    )
    settings = ProbeSettings(**{"memory_limit_bytes": None, "max_timed_s": 0.2, **settings})
    found = Run(session, device, settings, lambda progress: None).measure(0.0)
    assert found.start_wait_s == pytest.approx(0.2)
    assert found.samples_per_s == pytest.approx(NUM_SAMPLES / (6 * 0.04 + 0.2))
    assert found.step_s == pytest.approx(2 / found.samples_per_s)
    assert sum(found.phases_s.values()) == pytest.approx(found.step_s)


def test_a_run_of_forward_passes_counts_no_starts():
    device = open_device("cpu")
    session = prepare(SLOW, {"batch_size": 2, "num_workers": 1}, device=device)
    settings = ProbeSettings(memory_limit_bytes=None, max_timed_s=0.2)
    assert EvaluationRun(session, device, settings, lambda progress: None).measure(0.0).start_wait_s == 0.0


def first_timed(monkeypatch, choices, seed, num_samples=320, lengths=(6,)):
    """The samples that a probe times first: each input is its position in the training set, at one of some lengths."""
    taken = []

    class Positions(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            return torch.full((lengths[index % len(lengths)],), float(index)), index % 3

    def collate(samples):
        return nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True), torch.tensor(
            [of for _, of in samples]
        )

    def training_step(model, batch):
        taken.extend(batch[0][:, 0].int().tolist())
        return nn.functional.cross_entropy(model(batch[0][:, :6]), batch[1])

    time_blocks = Run._time
    monkeypatch.setattr(Run, "_time", lambda run: (taken.clear(), time_blocks(run))[1])
    task = Task(
        build_model=lambda: nn.Linear(6, 3), train_dataset=Positions, training_step=training_step, collate_fn=collate
    )
    device = open_device("cpu")
    # new shapes are not trained once more, and no stall of the machine ends timing before all samples are taken
    endless = {"max_timed_s": 1e3, "timeout_s": 1e4, "shapes_recur": False}
    settings = ProbeSettings(memory_limit_bytes=None, num_samples=num_samples, seed=seed, phases=False, **endless)
    run = Run(prepare(task, choices, device=device), device, settings, lambda progress: None)
    run.measure(0.0)
    run._micro_batches._batches.close()  # data workers of a loader that the garbage collector ends are waited for, 5 s each
    assert len(taken) >= num_samples
    return taken[:num_samples]


def test_probes_of_one_seed_time_the_same_samples(monkeypatch):
    monkeypatch.setattr(measure, "AHEAD_S", 1e3)
    small, large = {"batch_size": 4, "accumulation_steps": 8}, {"batch_size": 16, "accumulation_steps": 2}
    found = first_timed(monkeypatch, small, seed=1)
    assert found == first_timed(monkeypatch, large, seed=1) != first_timed(monkeypatch, large, seed=2)
    assert found == first_timed(monkeypatch, {**small, "num_workers": 2, "prefetch_factor": 3}, seed=1)


def test_what_workers_were_told_to_load_is_not_waited_for_where_that_takes_long(monkeypatch):
    choices = {"batch_size": 4, "accumulation_steps": 8}
    monkeypatch.setattr(measure, "AHEAD_S", 0.0)
    ahead = first_timed(monkeypatch, {**choices, "num_workers": 1}, seed=1)
    assert ahead[2 * 4 :] == first_timed(monkeypatch, choices, seed=1)[: -2 * 4]


def test_what_workers_were_told_to_load_is_left_out_where_samples_differ(monkeypatch):
    """Trained in another order, the few batches of long steps that are timed would be other work in each process."""
    choices, lengths = {"batch_size": 4, "accumulation_steps": 8}, range(6, 300)
    monkeypatch.setattr(measure, "AHEAD_S", 0.0)
    monkeypatch.setattr(measure, "LEFT_OUT_S", 1e3)
    in_order = first_timed(monkeypatch, choices, seed=1, lengths=lengths)
    loaded = {**choices, "num_workers": 2, "prefetch_factor": 3}
    for load_s, is_in_order in ((0.0, True), (1e3, False)):  # a worker that takes longer than a step would be behind
        monkeypatch.setattr(MicroBatches, "longest_load_s", load_s)
        assert (first_timed(monkeypatch, loaded, seed=1, lengths=lengths) == in_order) is is_in_order


def test_of_long_steps_whose_samples_differ_nothing_of_the_warm_up_is_timed(monkeypatch):
    monkeypatch.setattr(measure, "LONG_S", 0.0)
    monkeypatch.setattr(measure, "SLICE_ABOVE_S", 0.0)
    counted = []
    monkeypatch.setattr(Run, "_count_settled", lambda run, data_s: counted.append(run))
    for lengths in ((6,), range(6, 300)):
        first_timed(monkeypatch, {"batch_size": 4, "accumulation_steps": 8}, seed=1, num_samples=8, lengths=lengths)
    assert len(counted) == 1
