"""The answer as a script of plain torch: it runs where there is no autotune, and takes the session's steps to the last bit."""

from __future__ import annotations

import ast
import multiprocessing
import os
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import autotune
from autotune.errors import ConfigError
from autotune.export import Export, export
from autotune.records.config import World
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import load_task
from autotune.task.facts import gather_facts
from autotune.techniques import compile as techniques_compile
from autotune.techniques import find_techniques
from tests.report.sample_study import answer, but
from tests.techniques.test_frameworks import CHOICES
from tests.worlds import Ranks

TECHNIQUES = find_techniques()
complete = find_techniques().complete
keep_settings = find_techniques().keep_settings

RESULT = but(answer("sqlite:///gpt.db"), device="cpu", model="model.py", parts=("build_model", "make_batch"))
ROOT = Path(autotune.__file__).parents[1]
NUM_STEPS = 3
KIND = "from tests.techniques.kinds import KINDS\n\ntask = KINDS[{!r}]()\n"
LINES = """
import torch
from torch import nn

MAX_GRAD_NORM = 0.1
GLOBAL_BATCH = 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(16, 5000)

    def forward(self, words):
        return self.head(self.blocks(self.words(words)))


def build_model():
    return Model()


def train_dataset():
    lengths = torch.Generator().manual_seed(0)
    return [torch.randint(1, 8, (int(n),)) for n in torch.randint(2, 9, (60,), generator=lengths)]


def collate_fn(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def training_step(model, batch):
    scores = model(batch)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(scores, batch[:, 1:].flatten(), ignore_index=0)


def loss_weight(batch):
    return batch[:, 1:].count_nonzero()


def configure_optimizers(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]
"""
HELD = """
import autotune
import torch

mine = autotune.Task(build_model=lambda: torch.nn.Linear(8, 4), make_batch=torch.rand, max_grad_norm=0.5)
"""
SUBCLASS = """
import torch


class build_model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""
HUGGING_FACE = """
import torch
import transformers


def build_model():
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


def make_batch(batch_size):
    ids = torch.randint(64, (batch_size, 12))
    return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.2, -100, ids)}
"""
# With one sample more than its batches hold.
NORMALISED = """
import torch

GLOBAL_BATCH = 8


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def train_dataset():
    return [(torch.full((6,), float(number)), number % 3) for number in range(NUM_SAMPLES)]
"""
TASKS: dict[str, str] = {
    **{kind: KIND.format(kind) for kind in ("transformer", "residual", "recurrent", "unet", "sparse", "frozen")},
    "lines": LINES,
    "normalised": NORMALISED.replace("NUM_SAMPLES", "17"),
    "hugging_face": HUGGING_FACE,
    "gan": (ROOT / "tests/models/gan.py").read_text(),
    "variants": (ROOT / "tests/models/variants.py").read_text(),
}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "transformer": [
        {"batch_size": 2, "accumulation_steps": 2},
        {"batch_size": 4, "checkpoint_segments": 2, "checkpoint_policy": "selective", "attention": "math"},
        {"batch_size": 2, "accumulation_steps": 3, "checkpoint_segments": 3, "amp": "bf16", "optimizer_impl": "fused"},
        {"batch_size": 4, "param_dtype": "bf16", "optimizer_state": "cpu", "attention": "efficient"},
        {"batch_size": 4, "compile": "default", "checkpoint_segments": 1, "optimizer_in_backward": True},
        {"batch_size": 4, "activation_offload": 2, "matmul_precision": "tf32", "cudnn_benchmark": True},
    ],
    "residual": [
        {"batch_size": 2, "accumulation_steps": 2, "channels_last": True, "checkpoint_segments": 2},
        {"batch_size": 4, "inplace_activations": True, "optimizer_impl": "foreach", "amp": "bf16"},
    ],
    "recurrent": [{"batch_size": 2, "accumulation_steps": 2, "checkpoint_segments": 1, "keep_heap": True}],
    "unet": [{"batch_size": 4, "channels_last": True, "checkpoint_segments": 1, "amp": "bf16"}],
    "sparse": [{"batch_size": 2, "accumulation_steps": 2, "checkpoint_segments": 2}],
    "frozen": [{"batch_size": 4, "optimizer_in_backward": True, "checkpoint_segments": 2}],
    "lines": [
        {"batch_size": 4, "accumulation_steps": 2, "num_workers": 1, "persistent_workers": True, "prefetch_factor": 4},
        {"batch_size": 4, "accumulation_steps": 2, "length_bucketing": True, "loss_chunks": True},
        {"batch_size": 8, "device_prefetch": True, "optimizer_state": "cpu", "freeze": "words+blocks.0"},
    ],
    "normalised": [{"batch_size": 4, "accumulation_steps": 2}, {"batch_size": 8}],
    "hugging_face": [{"batch_size": 2, "accumulation_steps": 2, "attention": "sdpa", "checkpoint_segments": 2}],
    "gan": [{"batch_size": 4, "amp": "bf16"}],
    "variants": [{"batch_size": 12, "accumulation_steps": 4}, {"batch_size": 48, "variant": "small"}],
}
# In a world of two. A step of LINES takes eight samples, and of the stream as many.
STREAM = (
    LINES.replace("return [torch", "return Stream(torch").replace("=lengths)]", "=lengths))")
    + """


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = list(samples)

    def __iter__(self):
        return (self.samples[number] for number in torch.randperm(len(self.samples)))
"""
)
# Every third sample has no target that counts, and the mean over none is 0 / 0.
MASKED = LINES.replace("torch.randint(1, 8, (int(n),))", "torch.randint(2, (int(n),))").replace(
    "(2, 9, (60,)", "(2, 4, (60,)"
)
MASKED = MASKED.replace(
    "return nn.functional.cross_entropy(scores, batch[:, 1:].flatten(), ignore_index=0)",
    "losses = nn.functional.cross_entropy(scores, batch[:, 1:].flatten(), reduction='none')\n"
    "    return (losses * batch[:, 1:].flatten()).sum() / batch[:, 1:].sum()",
)
CONFIGS_OF_TWO: dict[str, list[dict[str, Any]]] = {
    "lines": [
        {"batch_size": 2, "accumulation_steps": 2, "ddp_bucket_view": True, "bucket_mb": 1},
        {"batch_size": 4, "ddp_static_graph": True, "optimizer_impl": "foreach", "amp": "bf16"},
        {"batch_size": 2, "accumulation_steps": 2, "parallel": "zero1", "length_bucketing": True},
        {"batch_size": 2, "accumulation_steps": 2, "parallel": "fsdp", "checkpoint_segments": 2},
        {"batch_size": 4, "parallel": "fsdp_grad", "shard_dtype": "bf16"},
        {"batch_size": 4, "parallel": "hsdp:1", "shard_offload": True},
    ],
    "stream": [{"batch_size": 4}],
    "masked": [{"batch_size": 1, "accumulation_steps": 4}],
    "normalised": [{"batch_size": 4}],
}
# Runs each exported file as the session is run, and keeps what it came to.
DRIVER = """
import itertools, runpy, sys
import torch

for file in sys.argv[1:]:
    torch.manual_seed(0)
    script = runpy.run_path(file, run_name="exported")
    torch.manual_seed(1)
    losses = [script["step"](batch) for batch in itertools.islice(script["steps"](), NUM_STEPS)]
    torch.save((losses, script["model"].state_dict()), f"{file}.pt")
""".replace("NUM_STEPS", str(NUM_STEPS))


@dataclass(frozen=True)
class Case:
    """What a config is exported as, the losses and the state of the model after the session's steps, and after its own."""

    exported: Export
    losses: list[Any]
    state: dict[str, Any]
    file: Path

    def run_alone(self) -> tuple[list[Any], dict[str, Any]]:
        found: tuple[list[Any], dict[str, Any]] = torch.load(f"{self.file}.pt")
        return found


def trained(model: Path, config: Mapping[str, Any], file: Path, *, is_built: bool = False) -> Case:
    """A case of a model file, or of the same task as one built in Python."""
    task = load_task(model)
    with keep_settings():
        torch.manual_seed(0)
        session = prepare(task, config, device="cpu", on_oom=RAISE)
        torch.manual_seed(1)
        losses = [session.step(batch) for batch in islice(session.loader, NUM_STEPS)]
    assert task.origin is not None
    facts = gather_facts(task)
    result = but(
        RESULT,
        config=complete(config, global_batch=task.global_batch).as_dict(),
        model="" if is_built else task.origin.source.spec,
        parts=facts.parts,
        has_batchnorm=facts.has_batchnorm,
        places=session.places,
    )
    exported = export(result, "torch")
    file.write_text(exported.text.replace('BACKEND = "inductor"', 'BACKEND = "aot_eager"'))
    return Case(exported, losses, session.model.state_dict(), file)


def exported_by_first(world: World, session: Session, model: Path, file: Path) -> Export:
    """The script of a session of a world, which its first rank has written."""
    facts = gather_facts(session.task)
    result = but(
        RESULT,
        config=session.config.as_dict(),
        num_processes=world.size,
        model=str(model),
        parts=facts.parts,
        has_batchnorm=facts.has_batchnorm,
        places=session.places,
    )
    exported = export(result, "torch")
    if world.rank == 0:
        file.write_text(exported.text)
    distributed.barrier()
    return exported


def trained_by_two(world: World, model: Path, config: dict[str, Any], file: Path) -> tuple[str, list[str]]:
    """A script of a world, written by its first rank and run by all: what it cannot say, and where it is not the session."""
    task = load_task(model)
    with keep_settings():
        torch.manual_seed(0)
        session = prepare(task, config, device="cpu", world=world, on_oom=RAISE)
        torch.manual_seed(1)
        losses = [float(session.step(batch)) for batch in islice(session.loader, NUM_STEPS)]
    exported = exported_by_first(world, session, model, file)
    torch.manual_seed(0)
    script = runpy.run_path(str(file), run_name="exported")
    torch.manual_seed(1)
    own = [float(script["step"](batch)) for batch in islice(script["steps"](), NUM_STEPS)]
    state, found = session.model.state_dict(), script["model"].state_dict()
    differ = [name for name in state if not torch.equal(local(state[name]), local(found[name]))]
    return str(dict(exported.unsaid)), differ + [f"{losses} {own}"] * (losses != own or not own)


def step_to_the_end(world: World, model: Path, file: Path) -> tuple[int, int]:
    """How many steps the session takes until its loader ends, and how many the script."""
    task = load_task(model)
    with keep_settings():
        session = prepare(task, {"batch_size": 4}, device="cpu", world=world, on_oom=RAISE)
        of_session = sum(session.step(batch).isfinite() for batch in session.loader)
    exported_by_first(world, session, model, file)
    script = runpy.run_path(str(file), run_name="exported")
    return int(of_session), sum(script["step"](batch).isfinite() for batch in script["steps"]())


def test_in_a_world_the_pass_ends_for_all_ranks_with_the_shortest_of_their_streams(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        STREAM.replace("list(samples)", "list(samples)[: 60 - 40 * torch.distributed.get_rank()]")
    )
    with Ranks(2) as ranks:
        assert ranks.run(step_to_the_end, tmp_path / "model.py", tmp_path / "exported.py") == [(3, 3)] * 2


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_the_kernels_of_attention_are_tried_in_the_order_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper and Blackwell GPUs torch's own order begins with cuDNN once it was asked."""
    own = torch._C._set_sdp_priority_order
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors: own([3, 1, 2, 0]))
    model, config, orders = tmp_path / "model.py", {"batch_size": 4, "attention": "efficient"}, []
    model.write_text(TASKS["transformer"])
    script = str(trained(model, config, tmp_path / "exported.py").file)
    for train in (lambda: prepare(model, config, device="cpu"), lambda: runpy.run_path(script, run_name="exported")):
        with keep_settings():
            train()
            orders.append(torch._C._get_sdp_priority_order()[:4])
    assert orders == [[2, 3, 1, 0]] * 2


def test_in_a_world_its_ranks_take_the_sessions_steps_to_the_last_bit(tmp_path: Path) -> None:
    models = {"lines": LINES, "stream": STREAM, "masked": MASKED}
    for kind, model in {**models, "normalised": NORMALISED.replace("NUM_SAMPLES", "18")}.items():
        (tmp_path / f"{kind}.py").write_text(model)
    with Ranks(2) as ranks:
        for kind, configs in CONFIGS_OF_TWO.items():
            for number, config in enumerate(configs):
                file = tmp_path / f"{kind}_{number}_exported.py"
                assert ranks.run(trained_by_two, tmp_path / f"{kind}.py", config, file) == [("{}", [])] * 2, config


def run(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(techniques_compile, "BACKEND", "aot_eager")  # generating code takes minutes
        for kind, model in TASKS.items():
            if kind == "hugging_face" and find_spec("transformers") is None:
                continue
            folder = tmp_path_factory.mktemp(kind)
            (folder / "model.py").write_text(model)
            found[kind] = [
                trained(folder / "model.py", config, folder / f"exported_{number}.py")
                for number, config in enumerate(CONFIGS[kind])
            ]
    run("-c", DRIVER, *(str(case.file) for of_kind in found.values() for case in of_kind), cwd=ROOT)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", TASKS)
def test_it_takes_the_sessions_steps_to_the_last_bit(kind: str, cases: dict[str, list[Case]]) -> None:
    if kind not in cases:
        pytest.skip("transformers is not installed")
    for case in cases[kind]:
        losses, state = case.run_alone()
        assert not case.exported.unsaid
        if not isinstance(losses[0], dict):  # of a whole step what it returns itself
            assert list(map(float, losses)) == list(map(float, case.losses)), case.file
        assert state.keys() == case.state.keys()
        assert [name for name in state if not torch.equal(state[name], case.state[name])] == [], case.file


def test_every_technique_that_can_run_here_is_among_them() -> None:
    tried = {name for configs in CONFIGS.values() for config in configs for name in config}
    tried |= {name for configs in CONFIGS_OF_TWO.values() for config in configs for name in config}
    assert TECHNIQUES.keys() - tried == {"expandable_segments", "pin_memory", "sync_batchnorm"}


def test_it_runs_by_itself_and_imports_no_autotune(cases: dict[str, list[Case]]) -> None:
    case = cases["lines"][0]
    case.file.write_text(case.file.read_text().replace("NUM_STEPS = 100", "NUM_STEPS = 2"))
    printed = run(str(case.file), cwd=case.file.parent)
    assert [line.partition(":")[0] for line in printed.splitlines()] == ["step 1", "step 2"]
    for text in (case.exported.text for of_kind in cases.values() for case in of_kind):
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [statement for statement in map(ast.unparse, imports) if "autotune" in statement]


def test_all_techniques_share_a_script_without_two_things_of_one_name() -> None:
    config = {name: choices[-1] for name, choices in CHOICES.items()} | {"freeze": "encoder", "amp": "fp16"}
    places = {name: {"modules": ["blocks.0"]} for name in TECHNIQUES}
    parts = ("build_model", "train_dataset", "MAX_GRAD_NORM")
    exported = export(but(RESULT, config=RESULT.config | config, places=places, parts=parts), "torch")
    assert not exported.unsaid
    defined = [node.name for node in ast.parse(exported.text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(defined) == len(set(defined))
    before, _, after = exported.text.partition("\nimport torch\n")
    assert "expandable_segments:True" in before and "pin_memory=True" in after


@pytest.mark.parametrize(
    ("users_own", "kept"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}, "max_split_size_mb:32,"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"},
            "max_split_size_mb:32,",
        ),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": ""}, ""),
    ],
)
def test_the_allocators_other_settings_stay(
    users_own: dict[str, str], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment := {**users_own})
    text = export(but(RESULT, config=RESULT.config | {"expandable_segments": True}), "torch").text
    exec(text.partition("\nimport torch\n")[0])
    assert {*environment.values()} == {f"{kept}expandable_segments:True"}


def test_what_cannot_be_said_is_listed_in_the_script_too() -> None:
    config = {"checkpoint_segments": 2, "freeze": "blocks:2", "of_tomorrow": 'spline\nimport os"""'}
    exported = export(replace(RESULT, config=RESULT.config | config, study='gpt\nimport os"""'), "torch")
    assert exported.unsaid == {
        "checkpoint_segments": "2 checkpoint segments: the study does not say which modules it acted on; search again",
        "freeze": "2 blocks frozen: it has no lines of plain torch",
        "of_tomorrow": f"no technique of that name is installed here, so {config['of_tomorrow']!r} cannot be translated",
    }
    assert "# NOT IN THIS SCRIPT" in exported.text and all(f"# - {name}" in exported.text for name in exported.unsaid)
    assert not [node for node in ast.parse(exported.text).body if ast.unparse(node) == "import os"]


def test_a_task_built_in_python_has_a_marked_place_for_its_functions() -> None:
    exported = export(but(RESULT, model="", parts=("build_model", "make_batch", "train_step")), "torch")
    assert "# YOUR CODE" in exported.text and "torch.optim.AdamW(" in exported.text
    assert ast.parse(exported.text)


def test_the_optimizer_of_a_task_built_in_python_has_a_marked_place_too(tmp_path: Path) -> None:
    config = {**RESULT.config, "batch_size": 4, "accumulation_steps": 1}
    parts = ("build_model", "make_batch", "training_step", "configure_optimizers")
    built = but(replace(RESULT, config=config), model="", parts=parts)
    text = export(built, "torch").text
    assert "AdamW" not in text and text.count("NotImplementedError") == 4
    for name, body in {
        "return the model, on the CPU": "return torch.nn.Linear(3, 1)",
        "return a batch of that many samples, on the CPU": "return torch.ones(batch_size, 3)",
        "return the mean loss of a batch": "return model(batch).mean()",
        "return the optimizer of the model's parameters, as your own code makes it": (
            "return torch.optim.SGD(model.parameters(), lr=0.5)"
        ),
    }.items():
        text = text.replace(f'raise NotImplementedError("{name}")', body)
    (tmp_path / "script.py").write_text(text)
    script = runpy.run_path(str(tmp_path / "script.py"))
    assert type(script["optimizer"]) is torch.optim.SGD
    before = script["model"].bias.clone()
    script["step"](next(script["steps"]()))
    torch.testing.assert_close(script["model"].bias, before - 0.5)


def test_a_task_built_in_python_takes_the_sessions_steps_to_the_last_bit_once_its_places_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines_of_the_user.py").write_text(LINES)
    monkeypatch.syspath_prepend(tmp_path)
    for config in CONFIGS["lines"]:
        case = trained(tmp_path / "lines_of_the_user.py", config, tmp_path / "exported.py", is_built=True)
        own = re.compile(r"def (\w+)\(.*\):\n    raise NotImplementedError\(.*\)|(\w+) = \.\.\.  # .*")
        text = own.sub(lambda place: f"from lines_of_the_user import {place[1] or place[2]}", case.exported.text)
        assert not case.exported.unsaid and text.count("from lines_of_the_user") >= 6
        case.file.write_text(text)
        with keep_settings():
            torch.manual_seed(0)
            script = runpy.run_path(str(case.file), run_name="exported")
            torch.manual_seed(1)
            losses = [script["step"](batch) for batch in islice(script["steps"](), NUM_STEPS)]
        assert list(map(float, losses)) == list(map(float, case.losses)), config


def test_the_architectures_of_a_task_built_in_python_have_a_marked_place_where_none_is_named() -> None:
    def exported(variant: str) -> str:
        config = {**RESULT.config, "variant": variant}
        return export(
            but(RESULT, model="", config=config, parts=("build_model", "make_batch", "VARIANTS")), "torch"
        ).text

    first, named = exported("none"), exported("small")
    assert "VARIANTS = ...  # " in first and "def build_model(variant_name):" in first and "VARIANTS[0]" in first
    assert "VARIANTS" not in named and 'build_model("small")' in named


def test_what_is_of_a_loader_is_listed_where_the_script_has_none() -> None:
    """As of an older study, which does not say what the task has."""
    config = {**RESULT.config, "num_workers": 2, "length_bucketing": True}
    exported = export(but(RESULT, model="", config=config, parts=()), "torch")
    assert exported.unsaid.keys() == {"num_workers", "length_bucketing"}
    assert "of a data loader" in exported.unsaid["num_workers"] and "Buckets" not in exported.text


def test_a_step_of_the_users_own_runs_without_autocasts_copies_of_weights_which_it_may_update() -> None:
    config = RESULT.config | {"amp": "bf16"}
    exported = export(but(replace(RESULT, config=config), parts=("build_model", "train_step")), "torch")
    assert (
        "with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):\n        return train_step"
        in exported.text
    )


def executed(folder: Path, monkeypatch: pytest.MonkeyPatch, **answer: Any) -> dict[str, Any]:
    """What the exported script defines, in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "model_of_the_search", None)  # put back as it was
    monkeypatch.chdir(folder)
    config = complete({"batch_size": 2, **answer.pop("config", {})}).as_dict()
    (folder / "exported.txt").write_text(export(but(RESULT, config=config, **answer), "torch").text)
    return runpy.run_path("exported.txt", run_name="exported")


@pytest.mark.parametrize("name", ["my-model", "copy", "class"])
@pytest.mark.parametrize("attribute", ["", "mine"])
def test_the_model_file_may_have_any_name_and_a_task_in_it(
    name: str, attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HELD if attribute else "import torch\n\nMAX_GRAD_NORM = 0.5\nbuild_model = lambda: torch.nn.Linear(8, 4)\n"
    (tmp_path / "a").mkdir()
    (tmp_path / f"a/{name}.py").write_text(text)
    model = f"a/{name}.py:{attribute}" if attribute else f"a/{name}.py"
    script = executed(tmp_path, monkeypatch, model=model, parts=("build_model", "MAX_GRAD_NORM"))
    assert isinstance(script["model"], torch.nn.Linear) and script["MAX_GRAD_NORM"] == 0.5


def test_what_a_model_file_defines_can_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy.py").write_text(SUBCLASS)
    script = executed(tmp_path, monkeypatch, model="copy.py", parts=("build_model",))
    assert type(pickle.loads(pickle.dumps(script["model"]))) is script["build_model"]


def test_it_says_at_its_top_what_it_leaves_to_the_reader() -> None:
    def head(*parts: str, warnings: tuple[str, ...] = ()) -> str:
        result = but(RESULT, parts=("build_model", *parts), warnings=warnings)
        return " ".join(export(result, "torch").text.partition("\n\n")[0].replace("\n# ", " ").split())

    assert "It seeds nothing. It ends after NUM_STEPS optimizer steps." in head("make_batch")
    assert "It ends after one pass over the dataset, or NUM_STEPS optimizer steps if" in head("train_dataset")
    assert "It steps no learning-rate scheduler" in head("make_batch", "configure_optimizers")
    assert "scheduler" not in head("make_batch", "configure_optimizers", "train_step")  # it gets all that is returned
    assert "The search warned: two lines" in head("make_batch", warnings=("two\nlines",))


@pytest.mark.parametrize(("chosen", "method"), [(None, "fork"), ("spawn", None)])
def test_data_workers_are_forked_unless_the_users_code_has_chosen_otherwise(
    chosen: str | None, method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: chosen)
    (tmp_path / "model.py").write_text(LINES)
    parts = ("build_model", "train_dataset")
    script = executed(tmp_path, monkeypatch, model="model.py", parts=parts, config={"num_workers": 1})
    context = script["loader"].multiprocessing_context
    assert (context and context.get_start_method(allow_none=True)) == method


def test_a_lightning_module_is_refused_with_the_exporter_that_suits_it() -> None:
    with pytest.raises(ConfigError, match="use --to lightning"):
        export(but(RESULT, parts=("build_model", "LightningModule")), "torch")
