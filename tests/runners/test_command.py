"""The user's own script as it is: real commands, whose optimizer's steps are heard of, and whatever else they do has an outcome."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.records.config import ProbeSettings, World
from autotune.records.outcome import Kind, Outcome
from autotune.runners import launch
from autotune.runners.command import Command, CommandRunner, files_of
from autotune.runners.jobs import InspectJob
from autotune.techniques import find_techniques
from tests.room import limit_bytes

techniques = find_techniques()

SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(900), max_timed_s=0.5, max_warmup_s=1.0, timeout_s=90)
LOOP = """
import os, subprocess, sys, time
import torch

def train(batch, steps=10**6, width=16, each=lambda step: None):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        each(step)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(batch, width)), torch.zeros(batch, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

batch = int(sys.argv[1])
"""


@contextmanager
def commanded(tmp_path: Path, line: str, choices: Any = None, **options: Any) -> Iterator[CommandRunner]:
    command = Command(line, choices or {})
    with CommandRunner(command, logs=tmp_path / "logs", device="cpu", **options) as runner:
        yield runner


def probed(tmp_path: Path, script: str, batch: int = 8, *, start: str = sys.executable, **changes: Any) -> Outcome:
    file = tmp_path / "script.py"
    file.write_text(LOOP + script)
    with commanded(tmp_path, f"{start} {file} {{batch_size}} {{output_dir}}") as runner:
        return runner.probe(techniques.complete({"batch_size": batch}), SETTINGS.replace(**changes))


def measured(outcome: Outcome) -> Any:
    assert outcome.kind is Kind.OK, outcome
    found = outcome.measurement
    assert found is not None and found.num_steps >= 4 and found.peak_bytes > 50 * 2**20
    assert found.samples_per_s_low <= found.samples_per_s <= found.samples_per_s_high
    return found


def test_a_loop_of_ones_own_is_timed_by_its_optimizer_steps_and_ended_when_enough_is_known(tmp_path):
    found = measured(probed(tmp_path, "train(batch, each=lambda step: time.sleep(0.02))"))
    assert 8 / found.step_s == pytest.approx(found.samples_per_s)
    assert 0.02 < found.step_s < 0.2
    assert found.setup_s > 0.1


def test_a_script_that_asks_for_torch_before_it_imports_it_is_heard_of_all_the_same(tmp_path):
    asking = tmp_path / "asking.py"
    asking.write_text("import importlib.util\nassert importlib.util.find_spec('torch')\n" + LOOP + "train(batch)")
    with commanded(tmp_path, f"{sys.executable} {asking} {{batch_size}}") as runner:
        measured(runner.probe(techniques.complete({"batch_size": 8}), SETTINGS))


def test_exactly_as_many_steps_are_timed_as_were_asked_for(tmp_path):
    found = measured(probed(tmp_path, "train(batch)", num_steps=7, max_warmup_s=0.0))
    assert len(found.block_samples_per_s) == 7 and found.num_steps == 10


def test_a_script_that_never_takes_a_step_is_an_error_that_says_so(tmp_path):
    outcome = probed(tmp_path, "print('evaluated')")
    assert outcome.kind is Kind.ERROR and "without a step of an optimizer" in outcome.cause
    assert "evaluated" in outcome.detail


def test_megabytes_on_stdout_reach_the_log_alone(tmp_path, capfd):
    outcome = probed(tmp_path, "train(batch, each=lambda step: print('x' * 100_000))")
    measured(outcome)
    assert capfd.readouterr().out == ""
    assert Path(outcome.log).stat().st_size < 2**21


def test_a_failed_allocation_that_the_script_catches_is_out_of_memory_all_the_same(tmp_path):
    script = """
def each(step):
    if step == 6:
        try:
            torch.empty(10**12)
        except RuntimeError as error:
            print("using a smaller batch:", error)
train(batch, each=each)
"""
    outcome = probed(tmp_path, script, interval=0.0001, max_timed_s=2.0)
    assert outcome.kind is Kind.OOM and "caught it and went on" in outcome.cause


def test_the_memory_limit_holds_for_the_command(tmp_path):
    outcome = probed(tmp_path, "train(batch, width=512)", 10**6)
    assert outcome.kind is Kind.OOM, outcome
    assert outcome.attempted_bytes > 10**9


def test_a_script_that_trains_in_a_fork_is_measured_and_leaves_nothing_running(tmp_path):
    script = """
subprocess.Popen(["sleep", "987.654"], start_new_session=True)
if os.fork():
    os.wait()
else:
    train(batch)
"""
    measured(probed(tmp_path, script))
    assert subprocess.run(["pgrep", "-f", "sleep 987.654"], capture_output=True).stdout == b""


def test_an_argument_that_the_script_does_not_know_is_an_error_with_what_it_printed(tmp_path):
    outcome = probed(tmp_path, "sys.exit('unrecognized arguments: --no-such')")
    assert outcome.kind is Kind.ERROR
    assert "status 1" in outcome.cause and "unrecognized arguments" in outcome.cause


def test_an_exception_is_an_error_with_the_scripts_own_frames(tmp_path):
    outcome = probed(tmp_path, "def broken():\n    raise ValueError('no such word')\ntrain(batch, 3)\nbroken()")
    assert outcome.kind is Kind.ERROR and "no such word" in outcome.cause
    assert "in broken" in outcome.detail


def test_a_script_that_ends_early_says_how_many_steps_it_took(tmp_path):
    outcome = probed(tmp_path, "train(batch, 2)")
    assert outcome.kind is Kind.ERROR and "2 optimizer steps, too few" in outcome.cause


def test_a_run_that_ends_with_some_blocks_timed_counts(tmp_path):
    slow = "train(batch, 12, each=lambda step: time.sleep(0.06))"
    found = measured(probed(tmp_path, slow, interval=0.0001, max_timed_s=30.0, max_warmup_s=0.0))
    assert found.num_steps == 12


def test_a_child_of_multiprocessing_that_ends_by_itself_counts(tmp_path):
    script = """
def child():
    train(batch, 12, each=lambda step: time.sleep(0.06))
process = torch.multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""
    found = measured(probed(tmp_path, script, interval=0.0001, max_timed_s=30.0, max_warmup_s=0.0))
    assert found.num_steps == 12


def test_a_crash_and_a_hang_are_told_apart(tmp_path):
    outcome = probed(tmp_path, "train(batch, 5)\nos.kill(os.getpid(), 11)")
    assert outcome.kind is Kind.CRASHED and "SIGSEGV" in outcome.cause
    outcome = probed(tmp_path, "time.sleep(1000)", timeout_s=3)
    assert outcome.kind is Kind.TIMEOUT


def test_a_probe_leaves_no_trace(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['CHAINED'] = 'yes'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")]))
    script = f"""
open({str(tmp_path / "seen")!r}, "w").write("\\n".join(
    [os.environ[name] for name in ("AUTOTUNE_PROBE", "WANDB_MODE", "HF_HUB_OFFLINE", "CHAINED")] + [os.getcwd(), sys.argv[2]]
))
open(os.path.join(sys.argv[2], "weights"), "w").write("x")
train(batch)
"""
    measured(probed(tmp_path, script))
    *variables, cwd, output = (tmp_path / "seen").read_text().split("\n")
    assert variables == ["1", "disabled", "1", "yes"]
    assert cwd == os.getcwd() and not Path(output).exists()


def inspected(tmp_path: Path, script: str, line: str, **options: Any) -> Any:
    (tmp_path / "script.py").write_text(LOOP + script)
    start = f"{sys.executable} {tmp_path / 'script.py'}"
    with commanded(tmp_path, f"{start} {line}", **options) as runner:
        return runner.run(InspectJob(memory_limit_bytes=SETTINGS.memory_limit_bytes, timeout_s=90))


def test_an_inspection_runs_a_few_steps_of_what_is_run_today(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "open('written', 'w')\nassert sys.argv[1:] == ['8', '2']\ntrain(batch)"
    found = inspected(
        tmp_path, script, "{batch_size} {accumulation_steps}", global_batch=16, baseline={"batch_size": 8}
    )
    assert found.baseline == {"batch_size": 8, "accumulation_steps": 2} and found.baseline_given
    assert found.batch.sizes == found.batch.accumulation_steps == (1, 2, 4, 8, 16)
    assert found.step_s > 0 and found.step_samples == 16 and found.outside_bytes > 50 * 2**20
    assert (found.facts.optimizer, found.facts.has_batchnorm, found.world) == ("AdamW", False, World())
    wrote, unseen = found.facts.warnings
    assert "wrote written into" in wrote and "the loss is the script's own and is not seen" in unseen
    assert not found.comparable  # so no time is kept for a check


def test_a_global_batch_is_shared_by_the_processes_that_an_inspection_finds(tmp_path):
    script = """
rank = 0 if os.fork() else 1
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
train(batch)
"""
    found = inspected(tmp_path, script, "{batch_size} {output_dir}", global_batch=64, baseline={"batch_size": 32})
    assert found.world.size == 2 and found.step_samples == 32
    assert found.global_batch == 64 and found.baseline["batch_size"] == 32


def test_a_baseline_that_does_not_fit_is_a_shortage_and_a_command_without_accumulation_takes_the_global_batch(tmp_path):
    found = inspected(tmp_path, "train(batch, width=512)", "{batch_size}", global_batch=10**6)
    assert "allocation" in found.shortage and found.batch.sizes == (10**6,)


def test_an_edited_module_that_the_command_imports_makes_another_task(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "net": "width = 16",
        "train": LOOP + "from pkg import net\ntrain(batch)",
    }.items():
        (package / f"{name}.py").write_text(text)

    def searched() -> str:
        with commanded(tmp_path, f"cd {tmp_path} && {sys.executable} -m pkg.train {{batch_size}}") as runner:
            return runner.run(InspectJob(memory_limit_bytes=None, timeout_s=90)).facts.source_hash

    first = searched()
    assert searched() == first
    (package / "net.py").write_text("width = 32")
    edited = searched()
    (package / "train.py").write_text(LOOP + "from pkg import net\ntrain(batch, width=net.width)")
    assert first != edited != searched() != first


@pytest.mark.parametrize("word", ["--config {}", "--config={}", "config={}"])
def test_an_edited_file_that_the_command_names_makes_another_task(tmp_path, word):
    config = tmp_path / "config.yaml"
    config.write_text("layers: 2")
    command = Command(f"python train.py {word.format(config)} {{batch_size}}", {})
    before = command.source_hash
    assert command.source_hash == before
    config.write_text("layers: 4")
    assert command.source_hash != before


def test_a_word_that_is_too_long_for_a_name_names_no_file():
    assert files_of(f"python -c '{'x' * 300}' --batch {{batch_size}}") == []


TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 2)
    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

rows = [{"x": torch.randn(16), "labels": 0} for _ in range(512)]
arguments = TrainingArguments(
    sys.argv[2], per_device_train_batch_size=int(sys.argv[1]), gradient_accumulation_steps=int(sys.argv[3]),
    num_train_epochs=1000, use_cpu=True, report_to=["none"], disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=rows).train()
"""
LIGHTNING = """
import sys
import lightning, torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 2)
    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.linear(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.zeros(512, dtype=torch.long))
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=1000, accumulate_grad_batches=int(sys.argv[3]), default_root_dir=sys.argv[2],
    enable_progress_bar=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=int(sys.argv[1])))
"""
ACCELERATE = """
import sys
import accelerate, torch

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=int(sys.argv[3]))
data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.zeros(512, dtype=torch.long))
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=int(sys.argv[1]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(10**6):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""
RANKS = """
import os, sys
import torch
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters())
held = torch.ones(10**7 * torch.distributed.get_rank())
while True:
    model(torch.randn(int(sys.argv[1]), 16)).sum().backward()
    optimizer.step()
"""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "module"),
    [
        pytest.param(TRAINER, "transformers", id="trainer"),
        pytest.param(LIGHTNING, "lightning", id="lightning", marks=SLOW),
        pytest.param(ACCELERATE, "accelerate", id="accelerate", marks=SLOW),
    ],
)
def test_a_frameworks_script_is_measured_in_its_own_optimizer_steps(tmp_path, script, module):
    pytest.importorskip(module)
    file = tmp_path / "train.py"
    file.write_text(script)
    line = f"{sys.executable} {file} {{batch_size}} {{output_dir}} {{accumulation_steps}}"
    before = set(os.listdir())
    with commanded(tmp_path, line) as runner:
        config = techniques.complete({"batch_size": 8, "accumulation_steps": 2})
        found = measured(runner.probe(config, SETTINGS.replace(memory_limit_bytes=limit_bytes(3000), timeout_s=300)))
    assert found.step_s == pytest.approx(16 / found.samples_per_s)
    assert set(os.listdir()) == before


@SLOW
def test_the_processes_of_one_command_are_gathered(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(RANKS)
    start = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {{devices}}"
    line = f"{start} {file} {{batch_size}} {{accumulation_steps}}"
    with commanded(tmp_path, line, global_batch=16, devices="2") as runner:
        inspection = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=90))
        assert not isinstance(inspection, Outcome), inspection
        assert inspection.world.size == 2 and inspection.global_batch == 16 and inspection.batch.sizes == (1, 2, 4, 8)
        config = techniques.complete({"batch_size": 8}, global_batch=8)
        found = measured(runner.probe(config, SETTINGS.replace(memory_limit_bytes=None, world=inspection.world)))
        by_itself = techniques.complete(inspection.baseline_alone)
        alone = measured(runner.probe(by_itself, SETTINGS.replace(memory_limit_bytes=None)))
    assert found.samples_per_s == pytest.approx(16 / found.step_s)
    assert len(found.waits_s) == 2  # by DDP's own clocks
    assert (by_itself.batch_size, by_itself.accumulation_steps) == (16, 1)
    assert alone.samples_per_s == pytest.approx(16 / alone.step_s)


def test_the_number_of_devices_is_filled_in_and_belongs_into_the_command(tmp_path):
    line = "torchrun --nproc-per-node {devices} fit.py {batch_size}"
    config = techniques.complete({"batch_size": 8})
    for devices, study in (("1", "fit"), ("cpu:2", "fit on cpu:2")):
        runner = CommandRunner(Command(line, {}), logs=tmp_path, device="cpu", devices=devices)
        assert runner.command(config) == f"torchrun --nproc-per-node {devices[-1]} fit.py 8"
        assert runner.default_study == study
    with pytest.raises(ConfigError, match=r"--command has no \{devices\}"):
        CommandRunner(Command("train.py {batch_size}", {}), logs=tmp_path, device="cpu", devices="2")


@pytest.mark.parametrize(
    ("devices", "world", "seen"),
    [
        (["cuda:0"], None, "4,5,6"),  # it may be the first of several
        (["cuda:0"], World(), "4"),
        (["cuda:1"], None, "5"),
        (["cuda:0", "cuda:2"], None, "4,6"),
        (["cpu", "cpu"], None, ""),
    ],
)
def test_a_command_sees_the_devices_that_it_is_to_train_on(tmp_path, monkeypatch, devices, world, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert launch._environment(tmp_path, devices, world)["CUDA_VISIBLE_DEVICES"] == seen


def test_a_command_line_is_filled_in_and_what_is_empty_leaves_no_blank():
    command = Command(
        "python train.py --bs {batch_size} {amp} {x} > {output_dir}/log",
        {"amp": {"off": "", "on": "--b"}, "x": {0: ""}},
    )
    line = command.line({"batch_size": 8, "amp": "off", "x": 0}, "a folder")
    assert line == "python train.py --bs 8 > 'a folder'/log"
    assert command.line({"batch_size": 8, "amp": "on", "x": 0}) == "python train.py --bs 8 --b > output/log"


@pytest.mark.parametrize(
    ("line", "choices", "said"),
    [
        ("python train.py {batch_size} {amp}", {}, "{amp}, which stands for nothing"),
        ("python train.py {batch_size}", {"amp": {"off": ""}}, "has no {amp}"),
        ("python train.py {batch_size}", {"batch_size": {"8": "8"}}, "filled in by autotune"),
        ("python train.py {batch_size} {stage}", {"stage": {"2": "--zero_stage 2"}}, "such as {my_stage}"),
    ],
)
def test_a_placeholder_and_its_choices_belong_together(line, choices, said):
    with pytest.raises(ConfigError) as raised:
        Command(line, choices)
    assert said in str(raised.value)


def test_a_command_without_a_batch_size_needs_a_global_batch(tmp_path):
    with pytest.raises(ConfigError, match="--global-batch N"):
        CommandRunner(Command("python train.py", {}), logs=tmp_path, device="cpu")


def test_a_baseline_that_does_not_make_the_global_batch_is_refused_once_the_processes_are_known(tmp_path):
    command = Command("python train.py {batch_size}", {})
    runner = CommandRunner(command, logs=tmp_path, device="cpu", global_batch=64, baseline={"batch_size": 32})
    assert runner._complete(runner._baseline, World(size=2)).batch_size == 32
    with pytest.raises(ConfigError, match="does not make a global batch of 64"):
        runner._complete(runner._baseline, World())
