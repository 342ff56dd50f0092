"""From a script as each peer's documentation has it to a tuned run: at most five changed lines, and the peer runs the rest."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("measured_once")

MAX_CHANGED = 5

TRAINER = (
    """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(config)
dataset = [{"input_ids": torch.randint(99, (16,)), "labels": i % 2} for i in range(128)]
training_args = TrainingArguments(
    output_dir="out", learning_rate=2e-5, per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True, report_to="none"
)
trainer = Trainer(model=model, args=training_args, train_dataset=dataset)
trainer.train()
print("done", trainer.state.global_step, trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps)
""",
    {
        "import torch\n": "import torch\nfrom autotune.integrations.transformers import AutotuneCallback\n",
        "train_dataset=dataset)": 'train_dataset=dataset, callbacks=[AutotuneCallback(budget="30s", trials=1)])',
    },
    "done 16 8",
)

LIGHTNING = (
    """
import lightning as L
import torch
from torch import nn, utils

class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

class Data(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.dataset = utils.data.TensorDataset(torch.randn(256, 64), torch.zeros(256))

    def train_dataloader(self):
        return utils.data.DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

data = Data()
trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(LitAutoEncoder(), data)
print("done", trainer.global_step, data.batch_size * trainer.accumulate_grad_batches)
""",
    {
        "import torch\n": "import torch\nfrom autotune.integrations.lightning import AutotuneCallback\n",
        "enable_checkpointing=False)": 'enable_checkpointing=False, callbacks=[AutotuneCallback(budget="30s", trials=1)])',
    },
    "done 8 32",
)

ACCELERATE = (
    """
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch.utils.data import DataLoader, TensorDataset

dataset = TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
loss_function = torch.nn.CrossEntropyLoss()

def get_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

@find_executable_batch_size(starting_batch_size=32)
def inner_training_loop(batch_size):
    accelerator = Accelerator(cpu=True)
    model = get_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(dataset, shuffle=True, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    samples, steps = 0, 0
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        samples, steps = samples + len(inputs), steps + accelerator.sync_gradients
    print("done", steps, samples // steps)

inner_training_loop()
""",
    {
        "from accelerate.utils import find_executable_batch_size": "import autotune.integrations.accelerate",
        "@find_executable_batch_size(starting_batch_size=32)": (
            "@autotune.integrations.accelerate.find_executable_config(lambda: autotune.Task.from_loader("
            'get_model(), DataLoader(dataset, batch_size=32), loss_function), device="cpu", budget="30s", trials=1)'
        ),
        "inner_training_loop(batch_size)": "inner_training_loop(config)",
        "Accelerator(cpu=True)": "Accelerator(cpu=True, **config.accelerator)",
        "batch_size=batch_size)": "**config.dataloader)",
    },
    "done 8 32",
)

LOOP = (
    """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_relu_stack = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.linear_relu_stack(x)

training_data = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
train_dataloader = DataLoader(training_data, batch_size=32)
model = NeuralNetwork()
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def train(dataloader, model, loss_fn, optimizer):
    steps = 0
    for X, y in dataloader:
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps

steps = train(train_dataloader, model, loss_fn, optimizer)
print("done", steps, len(training_data) // steps)
""",
    {
        "from torch import nn\n": "from torch import nn\nfrom autotune.integrations.loops import tune\n",
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n": (
            "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
            'train_dataloader = tune(model, train_dataloader, loss_fn, optimizer, budget="30s", trials=1).loader\n'
        ),
    },
    "done 8 32",
)

ACCELERATE_LOOP = (
    """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
dataset = TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
train_dataloader = DataLoader(dataset, shuffle=True, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
loss_function = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
steps = 0
for inputs, targets in train_dataloader:
    loss = loss_function(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    steps += 1
print("done", steps, len(dataset) // steps)
""",
    {
        "import torch\n": "import torch\nfrom autotune.integrations.loops import tune\n",
        "model, optimizer, train_dataloader, lr_scheduler =": (
            'train_dataloader = tune(model, train_dataloader, loss_function, optimizer, budget="30s", trials=1).loader\n'
            "model, optimizer, train_dataloader, lr_scheduler ="
        ),
    },
    "done 8 32",
)

SCRIPTS = {
    "transformers": [TRAINER],
    "lightning": [LIGHTNING],
    "accelerate": [ACCELERATE, ACCELERATE_LOOP],
    "torch": [LOOP],
}


@pytest.mark.timeout(300)  # two interpreters import the peer
@pytest.mark.parametrize(
    ("peer", "number"),
    [
        pytest.param(peer, number, marks=[] if (peer, number) == ("torch", 0) else [pytest.mark.slow])
        for peer, scripts in SCRIPTS.items()
        for number in range(len(scripts))
    ],
)
def test_a_script_is_tuned_by_five_changed_lines_at_most(peer: str, number: int, tmp_path: Path) -> None:
    """One probe is enough to come through all of it. The run takes as many samples per step as before."""
    pytest.importorskip(peer)
    script, edits, expected = SCRIPTS[peer][number]
    tuned = script
    for old, new in edits.items():
        assert tuned.count(old) == 1
        tuned = tuned.replace(old, new)
    changed = [line for line in difflib.ndiff(script.splitlines(), tuned.splitlines()) if line.startswith("+ ")]
    assert len(changed) <= MAX_CHANGED
    (tmp_path / "train.py").write_text(tuned)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout.splitlines(), done.stdout + done.stderr
    assert list((tmp_path / "studies").glob("*.db")) and "tells why" in done.stderr
