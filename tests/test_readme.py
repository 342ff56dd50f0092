"""What the README says is there, and its code runs. Its table of techniques: `test_house.py`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.parser import build_parser
from autotune.export import exporters
from autotune.task.model_file import CONSTANTS, SIGNATURES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODEL = """
import torch

def build_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

def train_dataset():
    return torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))

GLOBAL_BATCH = 16
BASELINE = {"batch_size": 8}
"""
SCRIPT = """
import sys
import torch
from model import build_model

model = build_model()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(100_000):
    model(torch.randn(int(sys.argv[2]), 16)).sum().backward()
    optimizer.step()
"""


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for which, block in found if which == language]


def python(beginning: str) -> str:
    """The one block of Python that begins so."""
    (block,) = (block for block in blocks("python") if block.startswith(beginning))
    return block


def synopsis() -> str:
    (block,) = (block for block in blocks("") if "autotune completion" in block)
    return block


def test_every_command_is_listed_and_has_the_options_that_are_named() -> None:
    commands = build_parser().commands
    listed = re.findall(r"^autotune (\w+)(.*)$", synopsis(), re.MULTILINE)
    assert [name for name, _ in listed] and {name for name, _ in listed} == commands.keys()
    for name, rest in listed:
        assert set(re.findall(r"--[a-z-]+", rest.partition("`")[0])) <= set(commands[name].format_help().split())


def test_every_command_to_type_is_read() -> None:
    for block in blocks(""):
        for line in block.replace("\\\n", "").splitlines():
            if block != synopsis() and line.startswith("autotune "):
                build_parser().parse_args(shlex.split(line, comments=True)[1:])


def test_every_option_in_the_text_exists() -> None:
    text = re.sub(r"^```.*?^```$|`make [^`]*`", "", README, flags=re.MULTILINE | re.DOTALL)
    helps = " ".join(command.format_help() for command in build_parser().commands.values())
    elsewhere = {"--config_file", "--nproc-per-node"}  # of `accelerate launch` and `torchrun`
    assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", text)} - elsewhere <= {*re.findall(r"--[a-z-]+", helps)}


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"`make ([a-z-]+)", README)} <= targets


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]*)\)", README):
        file, _, anchor = target.partition("#")
        page = ROOT / (file or "README.md")
        assert page.exists(), target
        titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_name_of_a_model_file_is_told() -> None:
    block = python("def build_model()")
    assert {*re.findall(r"^(?:def )?(\w+)", block, re.MULTILINE)} == {"build_model", *SIGNATURES, *CONSTANTS}


def test_every_form_of_export_is_told() -> None:
    table = README[README.index("| `--to` |") :].partition("\n\n")[0]
    assert {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])} == set(
        exporters()
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder `gpt` with a model file and a script, in which each search makes one probe; and what the code finds defined."""
    import autotune
    from autotune import api

    folder = tmp_path / "gpt"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("search", "search_command"):
        whole = getattr(api, name)
        quick = {"device": "cpu", "budget": "60s", "trials": 1}
        hurried = lambda *args, whole=whole, quick=quick, **options: whole(*args, **{**options, **quick})  # noqa: E731
        monkeypatch.setattr(api, name, hurried)
    model = __import__("model")
    return {"autotune": autotune, "model": model.build_model(), "dataset": model.train_dataset()}


@pytest.mark.slow
def test_the_python_runs(place: dict[str, Any]) -> None:
    exec(python("import autotune"), place)
    assert place["result"].config["batch_size"] and place["metrics"]["loss"] > 0 and len(place["frame"])


@pytest.mark.slow
def test_a_loop_of_ones_own_runs(place: dict[str, Any]) -> None:
    import torch

    place["loader"] = torch.utils.data.DataLoader(place["dataset"], batch_size=8)
    place["loss"], place["optimizer"] = torch.nn.CrossEntropyLoss(), torch.optim.AdamW(place["model"].parameters())
    given = place["loader"]
    exec(python("# a loop of your own"), place)
    assert place["loader"].batch_size == given.batch_size and place["loader"].dataset is given.dataset
    before = [parameter.clone() for parameter in place["model"].parameters()]
    inputs, targets = next(iter(place["loader"]))
    place["loss"](place["model"](inputs), targets).backward()
    place["optimizer"].step()
    after = place["model"].parameters()
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.slow
def test_the_lines_for_accelerate_run(place: dict[str, Any]) -> None:
    import torch

    pytest.importorskip("accelerate")
    place["loss"], place["get_model"] = torch.nn.CrossEntropyLoss(), lambda: place["model"]
    place["get_loader"] = lambda: torch.utils.data.DataLoader(place["dataset"], batch_size=8)
    code = python("# Accelerate").replace("config): ...", "config): return config.accelerator | config.dataloader")
    exec(code, place)
    assert place["train"]()["batch_size"]


@pytest.mark.slow
def test_the_lines_for_hugging_face_run(place: dict[str, Any]) -> None:
    import torch

    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=64, hidden_size=16, **sizes)
    place["model"] = transformers.BertForSequenceClassification(config)
    place["Trainer"] = transformers.Trainer
    given = place["args"] = transformers.TrainingArguments("out", use_cpu=True, report_to="none")
    dataset = [{"input_ids": torch.randint(64, (8,)), "labels": i % 2} for i in range(32)]
    place["trainer"] = transformers.Trainer(place["model"], given, train_dataset=dataset)
    exec(python("# Hugging Face"), place)
    assert isinstance(place["args"], transformers.TrainingArguments)


@pytest.mark.slow
def test_the_lines_for_lightning_run(place: dict[str, Any]) -> None:
    import torch

    L = pytest.importorskip("lightning")

    class Module(L.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = __import__("model").build_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    place["module"], place["datamodule"] = Module(), L.LightningDataModule.from_datasets(place["dataset"], batch_size=8)
    place["Trainer"] = L.Trainer
    place["trainer"] = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    exec(python("# Lightning"), place)
    assert place["found"].dataloader["batch_size"]
