"""What the functions of a task hold tells tasks of one script apart, and is the same in the script's next run."""

import dataclasses
import functools
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

import autotune
from autotune.task import Task
from autotune.task.held import held_by
from autotune.task.source import TaskSource

SIZE = 1

PRINTED = """
from functools import partial
import torch
from autotune.task.held import held_by
net = torch.nn.Linear(2, 2)
class Step:
    def __init__(self, names): self.names, self.net = names, net
    def __call__(self, model, batch): return model(batch) if batch in {"a", "b", "c"} else unknown(object())
def unknown(thing, names={"x", "y", "z"}): return unknown, thing, [name for name in names]
print(held_by(Step({"one", "two", "three"}), partial(unknown, object()), lambda: net))
"""


def closure(k):
    def training_step(model, batch):
        return model(batch) * k

    return training_step


class Step:
    def __init__(self, k):
        self.k = k

    def __call__(self, model, batch):
        return model(batch) * self.k

    def take(self, model, batch):
        return self(model, batch)


@dataclasses.dataclass(slots=True)
class Settings:
    k: int


class Scaled(torch.nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k


def with_default(k):
    return lambda model, batch, *, factor=k: model(batch) * factor


def decorated(k):
    return torch.no_grad()(closure(k))


def layers(k):
    return torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(k)])


WAYS = {
    "closure": closure,
    "default argument": with_default,
    "partial": lambda k: functools.partial(closure(0), batch=k),
    "callable instance": Step,
    "method": lambda k: Step(k).take,
    "decorated function": decorated,
    "function within": lambda k: closure(closure(k)),
    "containers": lambda k: closure({"a": [(k, None)], "b": {str(k)}}),
    "dataclass": lambda k: closure(Settings(k)),
    "models": lambda k: closure(layers(k)),
    "a model's own attribute": lambda k: closure(Scaled(k)),
    "shapes": lambda k: closure(torch.zeros(k)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_functions_that_hold_other_values_are_told_apart(way):
    assert held_by(way(1)) == held_by(way(1)) != held_by(way(12))


def test_two_functions_of_one_line_are_told_apart():
    double, triple = lambda x: x * 2, lambda x: x * 3
    nested, other = lambda x: [y * 2 for y in x], lambda x: [y * 3 for y in x]
    assert len({held_by(each) for each in (double, triple, nested, other)}) == 4


def test_a_global_that_a_function_reads_tells_it_apart(monkeypatch):
    def training_step(model, batch):
        return [model(batch) * SIZE for _ in batch]

    first = held_by(training_step)
    monkeypatch.setitem(globals(), "SIZE", 12)
    assert held_by(training_step) != first


def test_what_training_changes_in_a_tensor_or_a_model_changes_nothing():
    weights, model = torch.zeros(3), Scaled(1)
    step = closure([weights, model])
    before = held_by(step)
    weights += 1
    model.eval()
    assert held_by(step) == before


class Run:
    """Of a script that notes down when, where and as what it runs."""

    loss = "mean"

    def __init__(self, scale):
        self.scale = scale
        self._scale_of_all = 2 * len("ab")
        self.started, self.name, self.folder = time.time(), uuid.uuid4().hex, Path(uuid.uuid4().hex)
        self.tags = {"of": uuid.uuid4()}


class Noted(Run):
    def __init__(self, *given):
        super().__init__(*given)


@pytest.mark.parametrize("kind", [Run, Noted])
def test_a_texts_or_a_time_that_an_object_notes_down_of_its_run_changes_nothing(kind):
    assert held_by(closure(kind(1.0))) == held_by(closure(kind(1.0)))


@pytest.mark.parametrize("kind", [Run, Noted])
@pytest.mark.parametrize(
    ("name", "value"), [("scale", 0.5), ("scale", "half"), ("loss", "sum"), ("_scale_of_all", 3), ("tags", [0.5])]
)
def test_what_its_class_or_its_constructor_names_counts_and_so_does_all_that_is_no_text_and_no_fraction(
    kind, name, value
):
    run = kind(1.0)
    before = held_by(closure(run))
    setattr(run, name, value)
    assert held_by(closure(run)) != before


def test_functions_that_hold_each_other_or_much_have_an_end():
    def first():
        return second

    def second():
        return first, unset

    loop = [first, list(range(10**6))]
    loop.append(loop)
    assert held_by(closure(loop)) == held_by(closure(loop))
    if not loop:
        unset = 1


def test_it_is_the_same_in_another_process(tmp_path):
    (tmp_path / "train.py").write_text(PRINTED)

    def printed(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(autotune.__file__).parents[1])}
        command = [sys.executable, str(tmp_path / "train.py")]
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    assert printed("1") == printed("2") != b""


def test_tasks_that_a_script_makes_in_a_loop_have_studies_of_their_own(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)

    def version(k):
        return TaskSource.of(
            Task(build_model=torch.nn.Identity, make_batch=torch.zeros, training_step=closure(k))
        ).version

    assert version(1) == version(1) != version(12)
