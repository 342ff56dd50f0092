import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch

from autotune import prepare
from autotune.devices import linux
from autotune.techniques import find_techniques

techniques = find_techniques()
TECHNIQUES = find_techniques()

LOADING = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 4


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from Samples()


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


@pytest.mark.parametrize("name", LOADING)
def test_without_a_dataset_there_is_nothing_to_load(name, make_task, make_setting):
    technique = TECHNIQUES[name]
    support = technique.support(make_setting(make_task(linear)))
    assert support.choices == (technique.off,)
    assert support.reason


def test_workers_go_up_to_the_processors_there_are(make_task, make_setting, monkeypatch):
    setting = make_setting(make_task(linear, train_dataset=Samples))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(linux, "processor_quota", lambda: None)
    assert TECHNIQUES["num_workers"].support(setting).choices == (0, 1, 2, 4)
    monkeypatch.setattr(linux, "processor_quota", lambda: 2.5)
    assert TECHNIQUES["num_workers"].support(setting).choices == (0, 1, 2)


def test_an_iterable_dataset_gets_one_worker_at_most_with_the_reason(make_task, make_setting):
    support = TECHNIQUES["num_workers"].support(make_setting(make_task(linear, make_batch=None, train_dataset=Stream)))
    assert support.choices == (0, 1)
    assert "iterable" in support.reason


def test_pinned_memory_is_for_gpus(make_task, make_setting):
    assert TECHNIQUES["pin_memory"].support(make_setting(make_task(linear, train_dataset=Samples))).choices == (False,)


def test_without_workers_their_options_are_redundant_and_not_passed_on(make_task):
    task = make_task(linear, train_dataset=Samples)
    session = prepare(task, {"batch_size": 5, "persistent_workers": True, "prefetch_factor": 4}, device="cpu")
    assert sum(len(micro[1]) for group in session.loader for micro in group) == 10
    config = techniques.complete({"num_workers": 0})
    assert TECHNIQUES["persistent_workers"].is_redundant(config)
    assert TECHNIQUES["prefetch_factor"].is_redundant(config)
    assert not TECHNIQUES["prefetch_factor"].is_redundant(config.replace(num_workers=1))


def test_workers_load_every_sample_once(make_task):
    task = make_task(linear, train_dataset=Samples)
    config = {"batch_size": 5, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    session = prepare(task, config, device="cpu")
    seen = sorted(int(sample[0]) for group in session.loader for micro in group for sample in micro[0])
    assert seen == list(range(10))


@pytest.fixture
def start_method(monkeypatch):
    """Sets how Python starts processes, with another default than this Python's; put back at the end."""
    before = multiprocessing.get_start_method(allow_none=True)

    def choose(name, *, default):
        monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [default, "spawn", "fork"])
        multiprocessing.set_start_method(name, force=True)

    yield choose
    multiprocessing.set_start_method(before, force=True)


MODEL_FILE = """
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return torch.full((8,), float(index)), index % 4

def build_model(): return torch.nn.Linear(8, 4)
def train_dataset(): return Samples()
"""


def test_workers_know_what_a_model_file_defines_whatever_pythons_default(tmp_path, start_method):
    start_method("forkserver", default="forkserver")  # as from Python 3.14 on
    (tmp_path / "model.py").write_text(MODEL_FILE)
    session = prepare(tmp_path / "model.py", {"batch_size": 3, "num_workers": 1}, device="cpu")
    assert sum(len(micro[1]) for group in session.loader for micro in group) == 6


@pytest.mark.parametrize(
    ("chosen", "default", "options"),
    [
        (None, "fork", {"num_workers": 2, "multiprocessing_context": "fork"}),
        (None, "forkserver", {"num_workers": 2, "multiprocessing_context": "fork"}),
        ("spawn", "fork", {"num_workers": 2}),
        ("spawn", "forkserver", {"num_workers": 2}),
    ],
)
def test_workers_are_forked_unless_the_user_has_chosen_otherwise(start_method, chosen, default, options):
    start_method(chosen, default=default)
    build = SimpleNamespace(loader_options={})
    TECHNIQUES["num_workers"].apply(build, 2)
    assert build.loader_options == options


@pytest.mark.parametrize(("name", "choice"), [("num_workers", -1), ("num_workers", True), ("prefetch_factor", 0)])
def test_impossible_numbers_are_refused(name, choice):
    with pytest.raises(ValueError, match="expected a whole number"):
        TECHNIQUES[name].validate(choice)
