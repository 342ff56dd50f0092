"""An answer in other words: found by name, complete, and honest about what cannot be said."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autotune import plugins
from autotune.cli import main
from autotune.errors import ConfigError
from autotune.export import Export, Exporter, export, exporters
from autotune.records.config import Choice, World
from autotune.records.measured import Evaluation
from autotune.records.result import Result
from autotune.techniques import find_techniques
from tests.report.sample_study import answer, but, write_study

RESULT = answer("sqlite:///gpt.db")


class Shout(Exporter):
    """An exporter of another package."""

    name: ClassVar[str] = "shout"
    summary: ClassVar[str] = "in capitals"

    def export(self, result: Result, *, space: Mapping[str, Sequence[Choice]]) -> Export:
        return Export(str(result.config).upper())


class Silent(Shout):
    """The same name once more."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes exporters of this file entry points of a package."""

    def install(*names: str) -> None:
        entries = [EntryPoint(name.lower(), f"{__name__}:{name}", "autotune.exporters") for name in names]
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group == "autotune.exporters" else [])
        exporters.cache_clear()

    yield install
    exporters.cache_clear()


def test_json_is_the_config_itself() -> None:
    assert json.loads(export(RESULT, "json").text) == RESULT.config


def test_a_result_exports_itself_with_or_without_its_study(tmp_path: Path) -> None:
    study = tmp_path / "gpt.db"
    write_study(study)
    for storage in (f"sqlite:///{study}", f"sqlite:///{tmp_path / 'moved.db'}"):
        result = answer(storage)
        assert json.loads(result.export("json").text) == result.config
    assert not (tmp_path / "moved.db").exists()
    with pytest.raises(ConfigError, match="'toml' is not a known exporter"):
        RESULT.export("toml")


def test_env_is_a_line_a_key_that_a_shell_reads_back() -> None:
    config = {**RESULT.config, "note": "two words"}
    exported = export(but(RESULT, config=config), "env").text
    said = dict(word.split("=", 1) for word in shlex.split(exported))
    assert (said["AUTOTUNE_BATCH_SIZE"], said["AUTOTUNE_AMP"]) == ("24", "bf16")
    assert (said["AUTOTUNE_CHANNELS_LAST"], said["AUTOTUNE_NOTE"]) == ("false", "two words")
    assert len(said) == len(exported.splitlines()) == len(config)


def test_transformers_is_told_batch_accumulation_and_each_technique_in_its_own_words() -> None:
    exported = export(RESULT, "transformers")
    arguments = json.loads(exported.text)
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (24, 2)
    assert (arguments["bf16"], arguments["fp16"], arguments["optim"]) == (True, False, "adamw_torch_fused")
    assert not exported.unsaid


@pytest.mark.parametrize(("compiled", "tf32"), [("off", None), ("default", False)])
def test_a_trainers_convolutions_keep_tf32_unless_compiling_would_switch_it_on_everywhere(
    compiled: str, tf32: bool | None
) -> None:
    config = {**RESULT.config, "matmul_precision": "highest", "compile": compiled}
    assert json.loads(export(but(RESULT, config=config), "transformers").text)["tf32"] is tf32
    config["matmul_precision"] = "tf32"
    assert json.loads(export(but(RESULT, config=config), "transformers").text)["tf32"] is True


def test_the_loader_shuffles_unless_the_dataset_is_a_stream() -> None:
    stream = but(RESULT, parts=("train_dataset", "IterableDataset"))
    assert json.loads(export(RESULT, "lightning").text)["dataloader"]["shuffle"]
    assert "shuffle" not in json.loads(export(stream, "lightning").text)["dataloader"]


def test_the_batch_size_for_evaluation_is_said_or_listed() -> None:
    result = but(RESULT, evaluation=Evaluation(eval_batch_size=64))
    assert json.loads(export(result, "transformers").text)["per_device_eval_batch_size"] == 64
    assert "AUTOTUNE_EVAL_BATCH_SIZE=64" in export(result, "env").text
    for name in ("accelerate", "deepspeed", "json", "lightning", "torch", "yaml"):
        assert export(result, name).unsaid["eval_batch_size"].startswith("64: give it to the `DataLoader`")
    none = but(RESULT, evaluation=Evaluation(unfinished="no batch size fits"))
    assert export(none, "transformers") == export(RESULT, "transformers")


def test_a_last_sample_that_would_be_normalised_alone_is_listed_where_the_users_own_loader_gives_it() -> None:
    normalised = but(RESULT, has_batchnorm=True, parts=("build_model", "train_dataset"))
    for name in ("accelerate", "deepspeed", "lightning", "transformers"):
        assert "drop_last=True)" in export(normalised, name).unsaid["drop_last"]
        for never in (
            RESULT,
            but(normalised, parts=("train_dataset", "IterableDataset")),
            but(normalised, parts=("make_batch",)),
        ):
            assert "drop_last" not in export(never, name).unsaid


@pytest.mark.parametrize(
    ("name", "told"), [("accelerate", True), ("deepspeed", True), ("lightning", True), ("transformers", False)]
)
@pytest.mark.parametrize("part", ["loss_weight", "PreTrainedModel"])
def test_weights_of_micro_batches_are_listed_where_a_framework_has_none(name: str, told: bool, part: str) -> None:
    weighted = but(RESULT, parts=("build_model", "make_batch", part))
    assert ("its terms over the mean number" in export(weighted, name).unsaid.get("loss_weight", "")) is told
    whole = replace(weighted, config={**RESULT.config, "batch_size": 48, "accumulation_steps": 1})
    assert "loss_weight" not in {**export(whole, name).unsaid, **export(RESULT, name).unsaid}


@pytest.mark.parametrize("own", ["training_step", "LightningModule"])
def test_a_loss_of_the_users_own_weighs_micro_batches_of_a_hugging_face_model_by_samples(own: str) -> None:
    by_samples = but(RESULT, parts=("build_model", "make_batch", "PreTrainedModel", own))
    for name in ("accelerate", "deepspeed", "lightning"):
        assert "loss_weight" not in export(by_samples, name).unsaid


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("accelerate", "accelerator.clip_grad_norm_(model.parameters(), ...)"),
        ("deepspeed", "`gradient_clipping`"),
        ("lightning", "Trainer(gradient_clip_val=...)"),
        ("transformers", "TrainingArguments(max_grad_norm=...)"),
    ],
)
def test_a_model_files_clipping_is_listed_with_what_the_framework_clips_by(name: str, by: str) -> None:
    clipping = (*RESULT.parts, "MAX_GRAD_NORM")
    told = export(but(RESULT, model="model.py", parts=clipping), name).unsaid["max_grad_norm"]
    assert told.startswith(f"the file's MAX_GRAD_NORM clips gradients: give it to {by}")
    assert "max_grad_norm" not in export(but(RESULT, model="model.py"), name).unsaid
    assert "max_grad_norm" not in export(but(RESULT, parts=clipping), name).unsaid, "the user's script clips"


def test_a_trainer_does_not_clip_what_a_model_file_does_not() -> None:
    def said(model: str, *parts: str) -> Any:
        return json.loads(export(but(RESULT, model=model, parts=parts), "transformers").text).get("max_grad_norm")

    assert said("model.py", "build_model") == 0.0
    assert said("model.py", "build_model", "MAX_GRAD_NORM") is None, "listed, with a number that only the file knows"
    assert said("model.py", "build_model", "train_step") is None, "it may clip inside"
    assert said("", "build_model") is None, "it may be the user's Trainer, with a max_grad_norm of its own"


def test_a_trainer_does_not_fuse_an_adamw_that_was_not_fused() -> None:
    def exported(*parts: str, model: str = "model.py", searched: Sequence[Choice] = (), **choices: Choice) -> Export:
        config = {**RESULT.config, "optimizer_impl": "default", **choices}
        result = but(RESULT, config=config, model=model, parts=("build_model", *parts))
        return export(result, "transformers", space={"optimizer_impl": searched})

    def optim(found: Export) -> Any:
        assert not found.unsaid
        return json.loads(found.text).get("optim")

    assert optim(exported()) == "adamw_torch"
    assert optim(exported("configure_optimizers", searched=("default", "fused"))) == "adamw_torch"
    assert optim(exported(optimizer_state="8bit")) == "adamw_torch_8bit"
    assert optim(exported(model="")) is None, "it may be the user's Trainer, with an optim of its own"
    own = exported("configure_optimizers", searched=("default", "foreach"))
    assert "optim" not in json.loads(own.text) and "where yours has fused=True" in own.unsaid["optimizer_impl"]


def test_training_arguments_take_what_is_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = json.loads(export(RESULT, "transformers").text)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **{**said, "use_cpu": True})
    assert arguments.train_batch_size * arguments.gradient_accumulation_steps == 48


@pytest.mark.parametrize(("searched", "said"), [([0, 2, 4], True), ([0, 2, 4, 8], False), ([4], False), ([], False)])
def test_checkpointing_is_said_where_the_answer_checkpoints_every_block(searched: list[int], said: bool) -> None:
    config = {**RESULT.config, "checkpoint_segments": 4}
    exported = export(but(RESULT, config=config), "transformers", space={"checkpoint_segments": searched})
    assert ("gradient_checkpointing" in json.loads(exported.text)) is said
    assert (exported.unsaid.keys() == {"checkpoint_segments"}) is not said


def test_what_cannot_be_said_is_listed_with_the_reason() -> None:
    config = {**RESULT.config, "channels_last": True, "a_technique_of_tomorrow": "spline"}
    unsaid = export(but(RESULT, config=config), "transformers").unsaid
    assert unsaid == {
        "channels_last": "`TrainingArguments` has no argument for it",
        "a_technique_of_tomorrow": "no technique of that name is installed here, so 'spline' cannot be translated",
    }


def test_only_a_training_that_is_not_the_files_own_is_listed() -> None:
    config = {**RESULT.config, "variant": "base", "freeze": "0"}
    result = but(RESULT, config=config, trained={"freeze": "0"})
    for name in ("transformers", "accelerate", "lightning", "deepspeed"):
        assert export(result, name).unsaid.keys() & {"variant", "freeze"} == {"freeze"}


def test_an_optimizer_of_another_class_is_not_called_adamw() -> None:
    exported = export(but(RESULT, optimizer="SGD"), "transformers")
    assert "optim" not in json.loads(exported.text)
    assert exported.unsaid == {"optimizer_impl": "fused: `TrainingArguments` has no argument for it"}


PLACES = {"parallel": {"modules": ["h.0", "h.1"], "classes": ["Block"]}}


def of_world(device: str = "cuda:0", size: int = 2, places: dict[str, Any] = PLACES, **choices: Choice) -> Result:
    """An answer of several processes in fp32."""
    config = find_techniques().complete({"batch_size": 4, **choices}, world=World(size=size))
    return but(RESULT, config=config.as_dict(), device=device, num_processes=size, places=places)


def test_how_many_processes_train_is_said_or_listed() -> None:
    result = of_world(accumulation_steps=3)
    assert json.loads(export(result, "deepspeed").text)["train_batch_size"] == 4 * 3 * 2
    assert "num_processes: 2" in export(result, "accelerate").text
    assert json.loads(export(result, "lightning").text)["trainer"]["devices"] == 2
    assert "AUTOTUNE_NUM_PROCESSES=2" in export(result, "env").text
    for name in ("transformers", "deepspeed", "json", "yaml"):
        assert export(result, name).unsaid["num_processes"] == (
            "2: start the script with `torchrun --nproc-per-node 2`"
        )
        assert "num_processes" not in export(RESULT, name).unsaid


def test_an_answer_for_several_machines_is_started_on_each_of_them() -> None:
    result = but(of_world(size=8), asked={"devices": "2x4"})
    start = "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST"
    for name in ("transformers", "deepspeed", "json", "yaml"):
        assert export(result, name).unsaid["num_processes"] == (
            f"8: start the script on each of 2 machines, of which FIRST is one, with `{start}`"
        )
    text = export(result, "torch").text
    assert f"processes; start it on each of 2 machines, of which FIRST is one: {start} " in text
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    assert f"in the folder of the search, on each of 2 machines, of which FIRST is one: {start} THIS_FILE." in comment


def test_an_answer_for_one_device_is_kept_to_it_on_a_machine_that_has_more() -> None:
    def of_trainer(result: Result) -> tuple[Any, Any]:
        trainer = json.loads(export(result, "lightning").text)["trainer"]
        return trainer["accelerator"], trainer["devices"]

    on_gpu = but(RESULT, device="cuda:2")
    assert (of_trainer(RESULT), of_trainer(on_gpu), of_trainer(of_world())) == (("cpu", 1), ("gpu", [2]), ("gpu", 2))
    assert json.loads(export(RESULT, "deepspeed").text)["train_batch_size"] == 24 * 2
    # the number counts the devices that the search saw, so it is no value of the variable
    said = export(on_gpu, "transformers").unsaid["num_processes"]
    assert "by CUDA_VISIBLE_DEVICES (the answer is for cuda:2 of those that the search saw)" in said


def test_options_of_ddp_are_said_or_listed() -> None:
    unused = {"parallel": {"find_unused_parameters": True}}
    result = of_world(bucket_mb=5, ddp_bucket_view=True, places=unused)
    strategy = json.loads(export(result, "lightning").text)["trainer"]["strategy"]
    options = {"find_unused_parameters": True, "bucket_cap_mb": 5, "gradient_as_bucket_view": True}
    assert strategy == {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": options}
    said = ", ".join(f"{name}={value}" for name, value in options.items())
    assert f"kwargs_handlers=[DistributedDataParallelKwargs({said})]" in export(result, "accelerate").text
    arguments = json.loads(export(result, "transformers").text)
    assert (arguments["ddp_bucket_cap_mb"], arguments["ddp_find_unused_parameters"]) == (5, True)
    assert export(result, "transformers").unsaid.keys() == {"ddp_bucket_view", "num_processes"}
    assert export(result, "deepspeed").unsaid.keys() == {"bucket_mb", "ddp_bucket_view", "num_processes"}
    assert json.loads(export(of_world(), "lightning").text)["trainer"]["strategy"] == "ddp"


def test_shards_are_said_by_their_blocks_on_gpus() -> None:
    result = of_world(parallel="fsdp_grad", shard_dtype="bf16", shard_offload=True)
    arguments = json.loads(export(result, "transformers").text)
    assert arguments["fsdp"] and arguments["bf16"]
    assert arguments["fsdp_config"] == {
        "version": 2,
        "reshard_after_forward": False,
        "cpu_offload": True,
        "transformer_layer_cls_to_wrap": ["Block"],
    }
    file = export(of_world(size=4, parallel="hsdp:2"), "accelerate").text
    assert 'distributed_type: "FSDP"' in file and '"fsdp_transformer_layer_cls_to_wrap": "Block"' in file
    assert '{"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}' in file
    said = json.loads(export(result, "lightning").text)
    lines = "\n".join(said["configure_model"])
    assert said["trainer"]["precision"] == "bf16-mixed" and ast.parse(lines)
    assert all(part in lines for part in ('["h.0", "h.1"]', "reshard=False", "mp_policy=in_bf16()", "on_host(pinned="))
    assert export(result, "transformers").unsaid.keys() == {"num_processes"} and not export(result, "lightning").unsaid


NO_PLACES = "the study does not say which modules it acted on; search again"


@pytest.mark.parametrize("name", ["accelerate", "lightning", "torch", "transformers"])
def test_what_is_not_known_of_an_answer_whose_places_are_lost_is_listed(name: str) -> None:
    """As of an older study: all that shards is left out, since without its blocks it would be another training."""
    exported = export(of_world(parallel="fsdp", shard_dtype="bf16", places={}), name)
    assert NO_PLACES in exported.unsaid["parallel"] and NO_PLACES in exported.unsaid["shard_dtype"]
    assert not re.search(r'fully_shard\(|mp_policy=|"fsdp|"FSDP', exported.text)
    exported = export(of_world(places={}), name)
    assert "whether the loss leaves parameters out" in exported.unsaid["find_unused_parameters"]
    assert "find_unused_parameters" not in export(of_world(places={"parallel": {}}), name).unsaid


def test_shards_that_a_framework_does_not_make_are_listed() -> None:
    on_cpu = of_world("cpu", parallel="fsdp", shard_dtype="bf16")
    for name in ("transformers", "accelerate"):
        exported = export(on_cpu, name)
        assert "fsdp_" not in exported.text.replace("ddp_find", "")
        assert "on GPUs alone, and trains copies of the model on a CPU" in exported.unsaid["parallel"]
        assert "shard_dtype" in exported.unsaid and "shards travel in it" not in str(exported.unsaid)
        assert "zero1: " in export(of_world(parallel="zero1"), name).unsaid["parallel"]
        assert "shards travel in it" in export(of_world(parallel="fsdp", amp="bf16"), name).unsaid["amp"]
    assert "hsdp:2: " in export(of_world(size=4, parallel="hsdp:2"), "deepspeed").unsaid["parallel"]
    assert export(on_cpu, "deepspeed").unsaid.keys() == {"shard_dtype", "num_processes"}


def test_what_accelerate_is_told_of_several_processes_it_knows(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    (tmp_path / "config.yaml").write_text(
        export(of_world(size=4, parallel="hsdp:2", shard_offload=True), "accelerate").text
    )
    given = launch.launch_command_parser().parse_args(["--config_file", str(tmp_path / "config.yaml"), "train.py"])
    read, *_ = launch._validate_launch_command(given)
    assert (read.use_fsdp, read.fsdp_version, read.num_processes) == (True, 2, 4)
    assert (read.fsdp_offload_params, read.fsdp_reshard_after_forward) == (True, True)
    assert (read.use_parallelism_config, read.parallelism_config_dp_shard_size) == (True, 2)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"'toml' is not a known exporter; expected one of .*env: .*json: .*transformers: "
    ):
        export(RESULT, "toml")


def test_another_package_adds_an_exporter_by_an_entry_point(installed: Any) -> None:
    installed("Shout")
    assert "BF16" in export(RESULT, "shout").text


def test_two_exporters_of_one_name_are_refused(installed: Any) -> None:
    installed("Shout", "Silent")
    with pytest.raises(ConfigError, match=r"the name 'shout' of .* is taken by .*; rename it, or remove the package"):
        exporters()


def test_an_entry_point_that_is_no_exporter_is_refused_with_how_to_remove_it(installed: Any) -> None:
    installed("RESULT")
    with pytest.raises(
        ConfigError, match=r"is not a subclass of .*Exporter; correct it, or remove the package with `pip"
    ):
        exporters()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("exported") / "gpt.db")


def test_the_command_line_exports_to_stdout_or_a_file(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(study), "--to", "json"]) == 0
    printed = capsys.readouterr().out
    assert main(["export", str(study), "--to", "json", "--out", str(tmp_path / "config.json")]) == 0
    assert (tmp_path / "config.json").read_text() == printed
    assert capsys.readouterr().out == ""
    assert json.loads(printed) == RESULT.config


def test_the_answer_for_a_command_is_exported_where_its_choices_need_no_other_words() -> None:
    config = {"batch_size": 8, "accumulation_steps": 2, "amp": "bf16", "kernel": "own"}
    result = but(RESULT, config=config, command="torchrun train.py --bs 8 --bf16", num_processes=2)
    assert json.loads(export(result, "json").text) == config
    assert export(result, "yaml").text.splitlines()[-1] == 'kernel: "own"'
    assert "AUTOTUNE_KERNEL=own" in export(result, "env").text
    assert export(result, "json").unsaid["num_processes"] == "2: run torchrun train.py --bs 8 --bf16"
    for name in ("accelerate", "deepspeed", "lightning", "torch", "transformers"):
        with pytest.raises(
            ConfigError, match=rf"{name} cannot say it; .* --to env, json, yaml, or run it: torchrun train\.py --bs 8"
        ):
            export(result, name)


def test_a_study_without_an_answer_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unanswered = write_study(tmp_path / "gpt.db", with_probes=False, with_result=False)
    assert main(["export", str(unanswered), "--to", "json"]) == 2
    assert "has no answer yet" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["model.py", "model.py:mine"])
def test_the_model_file_is_not_overwritten(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path / "gpt.db", result=lambda storage: but(answer(storage), model=named))
    (tmp_path / "model.py").write_text("mine = 1\n")
    (tmp_path / "link.py").symlink_to("model.py")
    for out in ("./model.py", "link.py"):
        assert main(["export", str(study), "--to", "json", "--out", out]) == 2
        assert f"{Path(out)} is the model file itself; expected another file" in capsys.readouterr().err
    assert main(["search", named, "--out", "model.py"]) == 2
    assert (tmp_path / "model.py").read_text() == "mine = 1\n"
