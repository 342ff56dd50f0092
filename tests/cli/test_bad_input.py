"""Bad input: one clear paragraph, exit code 2, no traceback, and the next step. What a model file may lack: `task/test_loading.py`."""

import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.errors import TaskError
from autotune.probe.inspection import inspect_task
from autotune.task import load_task

MEASURED = "studies/.calibration"
GOOD = (Path(__file__).parent.parent / "models" / "tiny.py").read_text()


def run(cwd, *arguments):
    """A command, in this process, which has imported what it needs."""
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def refused(done, *expected):
    assert done.returncode == 2, done.stderr + done.stdout
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    paragraph = done.stderr.strip().splitlines()[-1]
    assert paragraph.startswith("autotune: ")
    for text in expected:
        assert text in done.stderr, done.stderr
    return paragraph


def search(folder, text, *options):
    """What the first search measures of this machine, which takes 3 s, is kept for the others."""
    (folder / "model.py").write_text(text)
    kept = folder.parent / "measured"
    if kept.exists():
        shutil.copytree(kept, folder / MEASURED, dirs_exist_ok=True)
    done = run(folder, "search", "model.py", "--device", "cpu", "--budget", "1m", *options)
    if (folder / MEASURED).exists():
        shutil.copytree(folder / MEASURED, kept, dirs_exist_ok=True)
    return done


def refused_at_its_first_step(folder, text, *expected):
    """As a search's process refuses it, in this one."""
    (folder / "model.py").write_text(text)
    with pytest.raises(TaskError) as raised:
        inspect_task(load_task(folder / "model.py"), device="cpu", memory_limit_bytes=None)
    for words in expected:
        assert words in str(raised.value)


def test_no_such_file(tmp_path):
    (tmp_path / "modle.py").write_text(GOOD)
    refused(run(tmp_path, "search", "model.py"), "model.py", "modle.py")


def test_a_syntax_error_shows_the_users_line(tmp_path):
    refused(search(tmp_path, "def build_model(:\n    pass\n"), "def build_model(:", "line 1")


def test_a_make_batch_that_ignores_its_size(tmp_path):
    text = GOOD.replace("torch.randn(batch_size, 128)", "torch.randn(7, 128)").replace("(batch_size,)", "(7,)")
    refused_at_its_first_step(tmp_path, text, "make_batch", "7")


def test_a_loss_that_is_not_a_scalar(tmp_path):
    text = GOOD + "\ndef training_step(model, batch):\n    return model(batch[0])\n"
    refused_at_its_first_step(tmp_path, text, "scalar", "training_step")


def test_a_loss_without_a_gradient(tmp_path):
    text = GOOD + "\ndef training_step(model, batch):\n    return model(batch[0]).mean().detach()\n"
    refused_at_its_first_step(tmp_path, text, "gradient", "training_step")


def test_two_optimizers(tmp_path):
    text = (
        GOOD
        + "\ndef configure_optimizers(model):\n    return [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]\n"
    )
    refused_at_its_first_step(tmp_path, text, "optimizer", "2")


def test_an_error_in_the_users_step_shows_the_users_frames(tmp_path):
    text = GOOD + "\ndef training_step(model, batch):\n    raise LookupError('the vocabulary is empty')\n"
    done = search(tmp_path, text)
    refused_with = done.stderr
    assert done.returncode == 2
    assert "the vocabulary is empty" in refused_with and "training_step" in refused_with and "model.py" in refused_with


def test_an_unknown_device(tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    refused(run(tmp_path, "search", "model.py", "--device", "tpu"), "tpu", "cpu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--slots", "two"), "'two' names no slots; expected a number, all, cuda:0,1 or cpu:2"),
        (("--slots", "cpu:999"), "each slot needs a core, and this process may use "),
        (("--slots", "cpu:2", "--device", "cuda"), "contradict each other; leave one of them out"),
        (("--slots", "2", "--devices", "cpu:2"), "--devices cpu:2 trains with several; leave one of them out"),
        (("--slots", "2", "--command", "train.py {batch_size}"), "leave --slots out, or search a MODEL"),
    ],
)
def test_slots_that_cannot_be_are_refused_with_what_to_do_before_the_model_is_imported(tmp_path, options, says):
    (tmp_path / "model.py").write_text("raise SystemExit('imported')\n" + GOOD)
    model = () if "--command" in options else ("model.py",)
    refused(run(tmp_path, "search", *model, *options), says)
    assert [file.name for file in tmp_path.iterdir()] == ["model.py"]


def test_an_unknown_technique(tmp_path):
    refused(search(tmp_path, GOOD, "--exclude", "apm"), "apm", "amp")


def test_an_unknown_choice(tmp_path):
    refused(search(tmp_path, GOOD, "--fix", "amp=bf17"), "bf17", "bf16")


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "model.py", "--fix", "ampp=bf16"],
        ["search", "model.py", "--include", "ampp"],
        ["sweep", "model.py", "--out", "table.csv", "--grid", "ampp=bf16"],
        ["probe", "model.py", "--config", '{"ampp": "bf16"}'],
        ["predict", "model.py", "--config", '{"ampp": "bf16"}'],
    ],
)
def test_a_typo_in_a_techniques_name_is_refused_before_the_model_is_imported(tmp_path, arguments):
    (tmp_path / "model.py").write_text("raise SystemExit('imported')\n" + GOOD)
    refused(run(tmp_path, *arguments), "'ampp' is not a technique; did you mean amp?")
    assert [file.name for file in tmp_path.iterdir()] == ["model.py"]  # and nothing is left behind


def test_a_fix_without_a_choice(tmp_path):
    refused(search(tmp_path, GOOD, "--fix", "amp"), "amp", "NAME=CHOICE")


def test_an_unknown_key_in_the_baseline(tmp_path):
    refused(search(tmp_path, GOOD.replace('{"batch_size": 4}', '{"batchsize": 4}')), "batchsize", "batch_size")


@pytest.mark.parametrize("command", [("probe",), pytest.param(("verify", "--steps", "2"), marks=pytest.mark.slow)])
def test_a_technique_that_does_not_apply(tmp_path, command):
    (tmp_path / "model.py").write_text(GOOD)
    done = run(
        tmp_path, *command, "model.py", "--device", "cpu", "--config", '{"batch_size": 4, "channels_last": true}'
    )
    refused(done, "channels_last=True", "the model has no 2-D convolution", "supported: False")


def test_a_function_that_nothing_uses_is_named_by_a_probe_too(tmp_path):
    (tmp_path / "model.py").write_text(GOOD + "\ndef trainings_step(model, batch): ...\n")
    done = run(tmp_path, "probe", "model.py", "--device", "cpu", "--config", '{"batch_size": 4}')
    assert done.returncode == 0, done.stderr
    assert "note: trainings_step in the model file is not used" in done.stderr


def test_a_batch_that_does_not_divide_the_global_batch(tmp_path):
    refused(search(tmp_path, GOOD.replace('{"batch_size": 4}', '{"batch_size": 5}')), "5", "48", "divide")


def test_a_config_that_does_not_keep_the_global_batch(tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    config = json.dumps({"batch_size": 5})
    refused(run(tmp_path, "probe", "model.py", "--device", "cpu", "--config", config), "5", "48")


def test_a_config_with_an_unknown_key(tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    refused(
        run(tmp_path, "probe", "model.py", "--device", "cpu", "--config", '{"batchsize": 4}'), "batchsize", "batch_size"
    )


def test_a_config_that_is_neither_json_nor_a_file(tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    refused(run(tmp_path, "probe", "model.py", "--config", "best.json"), "best.json")


def test_a_storage_that_cannot_be_opened(tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    (tmp_path / "notes.db").write_text("this is no database, but a text that is long enough to look at")
    refused(search(tmp_path, GOOD, "--storage", "notes.db"), "notes.db", "cannot be opened")


def test_an_unknown_sampler(tmp_path):
    refused(search(tmp_path, GOOD, "--sampler", "psychic"), "psychic", "tpe")


def test_a_memory_limit_that_is_no_size(tmp_path):
    done = search(tmp_path, GOOD, "--memory-limit", "lots")
    assert done.returncode == 2
    assert "lots" in done.stderr and "12GiB" in done.stderr


def test_showing_a_study_that_does_not_exist(tmp_path):
    refused(run(tmp_path, "show", "studies/gpt.db"), "studies/gpt.db")


def test_init_does_not_overwrite(tmp_path):
    assert run(tmp_path, "init").returncode == 0
    refused(run(tmp_path, "init"), "model.py")


def test_a_module_that_dies_at_import(tmp_path):
    refused(search(tmp_path, "import ctypes\nctypes.string_at(0)\n"), "SIGSEGV", "model.py")


@pytest.mark.parametrize("option", [("--trials", "0"), ("--global-batch", "0")])
def test_counts_below_one(tmp_path, option):
    refused(search(tmp_path, GOOD, *option), "at least 1")


def test_a_seed_that_numpy_would_refuse(tmp_path):
    refused(search(tmp_path, GOOD, "--seed", "-1"), "-1", "seed")


def test_an_out_file_that_cannot_be_written_is_refused_before_the_search(tmp_path):
    refused(search(tmp_path, GOOD, "--out", "missing/result.json"), "missing/result.json")


@pytest.mark.slow  # a search says so above
def test_an_error_of_the_users_code_in_a_single_probe_is_the_model_files(tmp_path):
    text = GOOD + "\ndef training_step(model, batch):\n    raise LookupError('the vocabulary is empty')\n"
    (tmp_path / "model.py").write_text(text)
    done = run(tmp_path, "probe", "model.py", "--device", "cpu", "--config", '{"batch_size": 4}')
    assert done.returncode == 2
    assert "the vocabulary is empty" in done.stdout
