"""What is exported is run by those whose words it is in: the peers themselves train with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.export import export
from autotune.records.config import Choice, World
from autotune.records.result import Result
from autotune.techniques import find_techniques
from tests.export import peers_of_two
from tests.report.sample_study import answer, but

GLOBAL_BATCH = 48
FEATURES = 8


def answered(**choices: Choice) -> Result:
    """An answer of micro batches of 24 in bf16, two of them a step, changed by `choices`."""
    result = answer("sqlite:///gpt.db")
    config = {**result.config, "optimizer_impl": "default", **choices}
    return but(result, config=config, device="cpu")


def dataset() -> torch.utils.data.Dataset[Any]:
    torch.manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(960, FEATURES), torch.randint(3, (960,)))


class Net(torch.nn.Module):
    """A model in the form that a Hugging Face Trainer takes; it keeps what it was trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, 3)
        self.seen: list[tuple[int, torch.dtype]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        self.seen.append((len(x), logits.dtype))
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels)}


def test_a_trainer_of_hugging_face_takes_twenty_steps_of_the_global_batch_in_the_precision(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = json.loads(export(answered(), "transformers").text)
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=20, **quiet, **said)
    net = Net()
    samples = [{"x": x, "labels": y} for x, y in dataset()]  # type: ignore[attr-defined]
    trainer = transformers.Trainer(model=net, args=arguments, train_dataset=samples)
    trainer.train()
    assert trainer.state.global_step == 20
    assert net.seen == [(24, torch.bfloat16)] * 40
    assert sum(size for size, _ in net.seen) == 20 * GLOBAL_BATCH


def test_a_trainer_of_lightning_steps_once_a_global_batch_in_the_precision(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    said = json.loads(export(answered(num_workers=1, prefetch_factor=4), "lightning").text)
    seen: list[tuple[int, torch.dtype]] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(FEATURES, 3)

        def training_step(self, batch: Any) -> torch.Tensor:
            logits = self.linear(batch[0])
            seen.append((len(batch[0]), logits.dtype))
            return torch.nn.functional.cross_entropy(logits.float(), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, **quiet, **said["trainer"])
    trainer.fit(Module(), torch.utils.data.DataLoader(dataset(), **said["dataloader"]))
    assert said["dataloader"]["shuffle"] and seen == [(24, torch.bfloat16)] * 40
    assert trainer.global_step == 960 // GLOBAL_BATCH


SCRIPT = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tests.export.test_peers import FEATURES, dataset

accelerator = ACCELERATOR
dataset = dataset()
loader = LOADER
model = torch.nn.Linear(FEATURES, 3)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps, types = 0, set()
optimizer.optimizer.register_step_post_hook(lambda *_: globals().update(steps=steps + 1))
model.register_forward_pre_hook(lambda _, inputs: types.add((len(inputs[0]), str(torch.get_autocast_dtype("cpu")))))
for x, y in loader:
    with accelerator.accumulate(model):
        with accelerator.autocast():
            loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(accelerator.mixed_precision, accelerator.device, steps, sorted(types))
"""


def test_accelerate_launches_a_script_with_what_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    exported = export(answered(), "accelerate").text
    (tmp_path / "config.yaml").write_text(exported)
    assert "with accelerator.accumulate(model):" in exported
    calls = [line.partition(": ")[2] for line in exported.splitlines() if line.startswith("# In train.py")]
    script = SCRIPT.replace("ACCELERATOR", calls[0]).replace("LOADER", calls[1])
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "config.yaml")]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, str(tmp_path / "train.py")],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["bf16 cpu 20 [(24, 'torch.bfloat16')]"], done.stderr


def test_deepspeed_takes_the_global_batch_and_trains_in_the_precision() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    said = json.loads(export(answered(), "deepspeed").text)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    deepspeed.init_distributed(dist_backend="gloo")
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=said)
    assert engine.train_batch_size() == GLOBAL_BATCH
    loader = torch.utils.data.DataLoader(dataset(), batch_size=engine.train_micro_batch_size_per_gpu())
    for x, labels in loader:
        engine.backward(engine(x=x, labels=labels)["loss"])
        engine.step()
    assert engine.global_steps == 960 // GLOBAL_BATCH
    assert net.seen == [(24, torch.bfloat16)] * 40


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launch(*arguments: str, file: Path) -> dict[str, list[float]]:
    """What two processes write into the file."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert file.exists() and done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(file.read_text())
    return found


def require_losses_of_the_session(found: dict[str, list[float]]) -> None:
    for name, losses in found.items():
        of_session = found[f"session:{name.partition(':')[2]}"]
        assert losses == pytest.approx(of_session, abs=1e-5), name
        assert len(losses) == peers_of_two.NUM_STEPS and losses[-1] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("peer", "configs"),
    [
        ("torch", ("ddp", "zero1", "fsdp", "fsdp_grad")),
        ("transformers", ("ddp", "fsdp", "fsdp_grad")),
        ("lightning", ("ddp", "fsdp", "fsdp_grad")),
        ("deepspeed", ("ddp", "zero1", "fsdp_grad", "fsdp")),
    ],
)
def test_two_processes_of_a_peer_have_the_sessions_losses(peer: str, configs: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(peer)
    runs = [f"{peer}:{config}" for config in configs]
    file = tmp_path / "found.json"
    found = launch(*TORCHRUN, "-m", "tests.export.peers_of_two", str(file), *runs, file=file)
    assert found.keys() >= {*runs}
    require_losses_of_the_session(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("config", "device"), [("ddp", "cpu"), ("fsdp", "cuda:0")])
def test_two_processes_that_accelerate_launches_have_the_sessions_losses(
    config: str, device: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    choices = find_techniques().complete(
        peers_of_two.CONFIGS[config], global_batch=peers_of_two.GLOBAL_BATCH, world=World(size=2)
    )
    result = but(peers_of_two.answer_of(choices.as_dict(), {"parallel": {"classes": ["Block"]}}), device=device)
    (tmp_path / "config.yaml").write_text(export(result, "accelerate").text)
    command = ("accelerate.commands.launch", "--config_file", str(tmp_path / "config.yaml"))
    file = tmp_path / "found.json"
    module = ("--main_process_port", "0", "-m", "tests.export.peers_of_two")
    require_losses_of_the_session(launch(*command, *module, str(file), f"accelerate:{config}", file=file))


@pytest.mark.slow
def test_torchrun_starts_the_script_itself(tmp_path: Path) -> None:
    choices = find_techniques().complete(
        {**peers_of_two.CONFIGS["ddp"], "batch_size": 2}, global_batch=8, world=World(size=2)
    )
    (tmp_path / "train.py").write_text(export(peers_of_two.answer_of(choices.as_dict(), {}), "torch").text)
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run([sys.executable, "-m", *TORCHRUN, "train.py"], env=environment)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"], done.stderr
    alone = run([sys.executable, "-m", *TORCHRUN[:-1], "1", "train.py"], env=environment)
    assert "The answer is one for 2 processes: torchrun --nproc-per-node 2" in alone.stderr


@pytest.mark.parametrize("name", ["json", "yaml"])
def test_recipes_read_back_every_choice_with_its_type(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    result = answered(amp="off", channels_last=True)
    assert yaml.safe_load(export(result, name).text) == result.config
