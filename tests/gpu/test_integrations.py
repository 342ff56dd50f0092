"""Trainers of each framework are tuned on a GPU and train there with the answer; a command's memory is what the driver has booked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.study.reading import load_study
from autotune.units import MIB
from tests.driver.cards import A100
from tests.driver.run import variables
from tests.gpu.test_cuda import require
from tests.integrations import launched_scripts as scripts
from tests.short_play_off import AUTOTUNE, SHORTEN

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_once")]

ROOT = Path(__file__).parents[2]
TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from autotune.integrations.transformers import tune

sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes))
lines = [{"input_ids": line, "labels": line} for line in torch.randint(50, (64, 16))]
quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
plain = TrainingArguments("out", per_device_train_batch_size=1, gradient_accumulation_steps=16, num_train_epochs=1, **quiet)
args = tune(Trainer(model, plain, train_dataset=lines), **SEARCH)
seen = watched(model.lm_head)
trainer = Trainer(model, args, train_dataset=lines)
trainer.train()
told(seen, trainer.state.global_step, args.per_device_train_batch_size * args.gradient_accumulation_steps)
"""
LIGHTNING = """
import lightning
from autotune.integrations.lightning import AutotuneCallback

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.batch_size = torch.nn.Linear(64, 4), 1

    def on_fit_start(self):
        self.seen = watched(self.net)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(DATA, batch_size=self.batch_size)

module = Module()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
callbacks = [AutotuneCallback(**SEARCH)]
trainer = lightning.Trainer(accelerator="gpu", accumulate_grad_batches=16, max_epochs=1, callbacks=callbacks, **quiet)
trainer.fit(module)
told(module.seen, trainer.global_step, module.batch_size * trainer.accumulate_grad_batches)
"""
ACCELERATE = """
import accelerate
import autotune
from autotune.integrations.accelerate import find_executable_config

loss = torch.nn.CrossEntropyLoss()

def task():
    loader, model = torch.utils.data.DataLoader(DATA, batch_size=1), torch.nn.Sequential(torch.nn.Linear(64, 4))
    return autotune.Task.from_loader(model, loader, loss, baseline={"accumulation_steps": 16})

@find_executable_config(task, **SEARCH)
def train(config):
    accelerator = accelerate.Accelerator(**config.accelerator)
    net = torch.nn.Sequential(torch.nn.Linear(64, 4))
    seen = watched(net[0])
    loader = torch.utils.data.DataLoader(DATA, **config.dataloader)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    steps = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
    told(seen, steps, loader.total_batch_size * accelerator.gradient_accumulation_steps)

train()
"""
LOOP = """
import time
from autotune.integrations.loops import tune

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        time.sleep(0.01)
        return DATA[index]

model, loss = torch.nn.Sequential(torch.nn.Linear(64, 4)).cuda(), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
SEARCH["fix"] |= {"batch_size": 16, "num_workers": 2}
loader = tune(model, torch.utils.data.DataLoader(Slow(), batch_size=16), loss, optimizer, **SEARCH).loader
seen, steps = watched(model[0]), 0
for x, y in loader:
    loss(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
told(seen, steps, loader.batch_size)
"""
SCRIPTS = {"transformers": TRANSFORMERS, "lightning": LIGHTNING, "accelerate": ACCELERATE, "torch": LOOP}
AROUND = """
import json

import torch
SHORTEN
DATA = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(4, (64,)))
SEARCH = {"budget": "5m", "trials": 2, "fix": {"amp": "bf16", "batch_size": 16}, "listeners": ()}

def watched(module):
    seen = set()
    module.register_forward_pre_hook(
        lambda _, inputs: seen.add((inputs[0].device.type, torch.is_autocast_enabled("cuda")))
    )
    return seen

def told(seen, steps, samples):
    print(json.dumps({"seen": sorted(seen), "steps": steps, "samples": samples}))

SCRIPT
"""


@pytest.fixture(params=SCRIPTS)
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What a script says of its training: it has 64 samples, and takes 16 of them a step."""
    require((8, 0), "bf16")
    pytest.importorskip(request.param)
    (tmp_path / "train.py").write_text(AROUND.replace("SHORTEN", SHORTEN).replace("SCRIPT", SCRIPTS[request.param]))
    done = run([sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=False)


def test_a_tuned_trainer_trains_on_the_gpu_in_what_was_fixed_and_keeps_its_steps(trained: dict[str, Any]) -> None:
    assert trained == {"seen": [["cuda", True]], "steps": 4, "samples": 16}


@pytest.mark.slow
@pytest.mark.played
def test_what_accelerate_launch_shards_is_tuned_and_trained_in_shards(tmp_path: Path) -> None:
    """Accelerate's own example, on two cards."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tuned = scripts.replaced(scripts.ACCELERATE, scripts.ACCELERATE_TUNED)
    (tmp_path / "train.py").write_text(f"{SHORTEN}\n{tuned}")
    (tmp_path / "fsdp.yaml").write_text(scripts.ACCELERATE_FSDP)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml", "train.py"]
    done = run(command, tmp_path, **variables(tmp_path / "books", A100, 2, copies_up_to=65536))
    assert done.returncode == 0 and "tells why" in done.stderr, done.stderr
    assert "epoch 0: 8 steps of 32, FullyShardedDataParallel" in done.stdout.splitlines()
    (study,) = (tmp_path / "studies").glob("*.db")
    baseline = load_study(study).probes[0].config
    assert (baseline["parallel"], baseline["shard_dtype"], baseline["batch_size"]) == ("fsdp", "bf16", 16)


COMMAND = """
import argparse
import os
from pathlib import Path

import torch
from tests.driver.played import Played

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--accumulate", type=int)
parser.add_argument("--bf16", action="store_true")
given = parser.parse_args()
device = torch.device("cuda")
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
books, peak, SECOND = Played(Path(os.environ["PLAYED_STATE"])), 0, 1
while True:
    for _ in range(given.accumulate):
        with torch.autocast("cuda", torch.bfloat16, enabled=given.bf16):
            loss = model(torch.randn(given.batch, 2048, device=device)).square().mean()
        loss.backward()
        peak = max(peak, books.processes(SECOND)[os.getpid()])
        Path("PEAKS", str(os.getpid())).write_text(str(peak))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.played
def test_the_memory_of_a_command_is_what_the_driver_has_booked(tmp_path: Path) -> None:
    """On the second of two cards, while others hold much of the first."""
    peaks = tmp_path / "peaks"
    peaks.mkdir()
    (tmp_path / "train.py").write_text(COMMAND.replace("PEAKS", str(peaks)))
    line = f"{sys.executable} train.py --batch {{batch_size}} --accumulate {{accumulation_steps}} {{precision}}"
    choices = ["--choices", "precision:fp32=,bf16=--bf16", "--global-batch", "4096", "--baseline", "batch_size=4096"]
    ends = ["--device", "cuda:1", "--budget", "2m", "--trials", "1"]
    command = [*AUTOTUNE, "search", "--command", line, *choices, *ends]
    crowded = replace(A100, neighbour_bytes=A100.total_bytes - 600 * MIB)
    played = variables(tmp_path / "books", crowded, others=(A100,))
    done = run(command, tmp_path, **played)
    assert done.returncode == 0, done.stderr
    booked = {int(file.read_text()) for file in peaks.iterdir()}
    (study,) = (tmp_path / "studies").glob("*.db")
    (probe,) = load_study(study).probes
    assert probe.outcome.measurement.peak_bytes in booked
