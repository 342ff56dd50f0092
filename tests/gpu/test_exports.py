"""What is exported of an answer for a GPU trains there, run by those whose words it is in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.export import export
from autotune.records.result import Result
from tests.devices.processes import in_process
from tests.export.test_peers import FEATURES, SCRIPT, Net, answered, dataset
from tests.gpu.test_cuda import require
from tests.report.sample_study import but

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MODEL = """
import torch

def build_model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))

def train_dataset():
    return [(torch.randn(3, 8, 8), index % 4) for index in range(144)]
"""
# the micro batches of an answer for a GPU: where, how many samples, in which precision
SEEN = [("cuda", 24, "torch.bfloat16")]


def on_gpu(**choices: Any) -> Result:
    """An answer of micro batches of 24 in bf16, two of them a step, with what only a GPU has."""
    require((8, 0), "bf16")
    gpu = {"matmul_precision": "tf32", "optimizer_impl": "fused", "pin_memory": True, "num_workers": 1}
    return but(answered(**{**gpu, **choices}), device="cuda:0")


def seen_by(module: torch.nn.Module) -> set[tuple[str, int, str]]:
    """What a module is given from now on."""
    seen = set()

    def see(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        precision = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else "fp32"
        seen.add((inputs[0].device.type, len(inputs[0]), str(precision)))

    module.register_forward_pre_hook(see)
    return seen


def test_hugging_faces_trainer_takes_steps_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = json.loads(export(on_gpu(), "transformers").text)

    def train() -> Any:
        import transformers
        from torch.backends.cuda import matmul

        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=4, **quiet, **said)
        net = Net()
        seen = seen_by(net.linear)
        samples = [{"x": x, "labels": y} for x, y in dataset()]  # type: ignore[attr-defined]
        trainer = transformers.Trainer(model=net, args=arguments, train_dataset=samples)
        trainer.train()
        fused = trainer.optimizer.param_groups[0]["fused"]
        return sorted(seen), trainer.state.global_step, fused, matmul.fp32_precision

    assert in_process(train) == (SEEN, 4, True, "tf32")


def test_lightnings_trainer_takes_steps_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    said = json.loads(export(on_gpu(cudnn_benchmark=True), "lightning").text)

    def train() -> Any:
        import lightning
        from torch.backends import cudnn

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(FEATURES, 3)

            def training_step(self, batch: Any) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(self.linear(batch[0]).float(), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(max_steps=4, **quiet, **said["trainer"])
        module = Module()
        seen = seen_by(module.linear)
        trainer.fit(module, torch.utils.data.DataLoader(dataset(), **said["dataloader"]))
        return sorted(seen), trainer.global_step, cudnn.benchmark

    assert in_process(train) == (SEEN, 4, True)


def test_accelerate_launches_a_script_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    exported = export(on_gpu(), "accelerate").text
    (tmp_path / "config.yaml").write_text(exported)
    calls = [line.partition(": ")[2] for line in exported.splitlines() if line.startswith("# In train.py")]
    script = SCRIPT.replace("ACCELERATOR", calls[0]).replace("LOADER", calls[1]).replace('"cpu"', '"cuda"')
    (tmp_path / "train.py").write_text(script)
    launch = ["-m", "accelerate.commands.launch", "--config_file", "config.yaml", "train.py"]
    assert run(*launch, cwd=tmp_path) == "bf16 cuda 20 [(24, 'torch.bfloat16')]"


def test_a_script_of_plain_torch_trains_on_the_gpu_by_itself(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    gpu = {"cudnn_benchmark": True, "expandable_segments": True, "device_prefetch": True, "channels_last": True}
    result = but(on_gpu(**gpu), model="model.py", parts=("build_model", "train_dataset"))
    exported = export(result, "torch")
    assert not exported.unsaid
    at_its_end = """
segments = [segment for segment in torch.cuda.memory_snapshot() if segment["is_expandable"]]
print(number, model[0].weight.device, model[0].weight.is_contiguous(memory_format=torch.channels_last), bool(segments))
"""
    (tmp_path / "train.py").write_text(exported.text + at_its_end)
    assert run("train.py", cwd=tmp_path) == "3 cuda:0 True True"


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_deepspeed_trains_on_the_gpu(name: str) -> None:
    pytest.importorskip("deepspeed")
    said = json.loads(export(on_gpu(amp=name), "deepspeed").text)

    def train() -> Any:
        import deepspeed

        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
        os.environ.update(alone)
        net = Net()
        seen = seen_by(net.linear)
        engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=said)
        for x, labels in torch.utils.data.DataLoader(dataset(), batch_size=engine.train_micro_batch_size_per_gpu()):
            engine.backward(engine(x=x.to(engine.device), labels=labels.to(engine.device))["loss"])
            engine.step()
        return {place[:2] for place in seen}, engine.global_steps + engine.skipped_steps

    assert in_process(train) == ({("cuda", 24)}, 20)


def run(*arguments: str, cwd: Path) -> str:
    """The last line that an interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
