import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from autotune.errors import TaskError
from autotune.task import Task, load_task


def refused(spec, *expected):
    with pytest.raises(TaskError) as caught:
        load_task(spec)
    message = str(caught.value)
    for text in expected:
        assert text in message, message
    assert "\n" not in message
    return caught.value


def test_importing_the_task_package_imports_no_torch():
    subprocess.run([sys.executable, "-c", "import autotune.task, sys; assert 'torch' not in sys.modules"], check=True)


def test_functions_and_constants_are_found_by_name(load):
    task = load(
        """
        def training_step(model, batch): return model(batch[0]).mean()
        def configure_optimizers(model): return torch.optim.SGD(model.parameters(), lr=0.1)
        def train_dataset(): return [(torch.zeros(4), 0)] * 5
        def collate_fn(samples): return torch.utils.data.default_collate(samples)
        def checkpoint_blocks(model): return [model]
        def loss_weight(batch): return 7
        GLOBAL_BATCH = 8
        BASELINE = {"batch_size": 4}
        MAX_GRAD_NORM = 1
        """
    )
    assert isinstance(task.build_model(), torch.nn.Linear)
    assert (task.global_batch, task.baseline, task.max_grad_norm) == (8, {"batch_size": 4}, 1)
    assert task.weight(None, 1) == 7
    assert len(task.dataset()) == 5
    functions = (task.training_step, task.configure_optimizers, task.collate_fn, task.checkpoint_blocks)
    assert None not in functions


def test_only_build_model_and_make_batch_are_required(load):
    task = load()
    assert task.training_step is None and task.global_batch is None and task.dataset() is None


@pytest.mark.parametrize("name", ["with space.py", "größe_模型.py", "a:b.py", "12 monkeys.py"])
def test_a_file_name_with_spaces_other_letters_or_a_colon_works(load, name):
    assert load(name=name).name == name.removesuffix(".py")


def test_an_attribute_after_a_colon_names_a_task_object(write):
    path = write(
        "import autotune\nsmall = autotune.Task(build_model=build_model, make_batch=make_batch)", name="a:b.py"
    )
    assert load_task(f"{path}:small").name == "a:b-small"


def test_a_generic_file_name_gives_the_folders_name_to_the_task(write):
    assert load_task(write(name="gpt/model.py")).name == "gpt"
    assert load_task(write(name="gpt/train.py")).name == "gpt"
    assert load_task(write(name="gpt/tiny.py")).name == "tiny"


def test_a_task_object_named_task_is_taken_where_there_is_no_build_model(write):
    path = write(
        """
        import torch, autotune
        def build(): return torch.nn.Linear(2, 2)
        task = autotune.Task(build_model=build, make_batch=lambda n: torch.zeros(n, 2), name="mine")
        """,
        whole=True,
    )
    assert load_task(path).name == "mine"


def test_a_path_is_relative_to_the_working_directory(write, monkeypatch):
    monkeypatch.chdir(write(name="here/model.py").parent)
    assert load_task("model.py").name == "here"


def test_siblings_of_the_file_can_be_imported(write):
    write("WIDTH = 6", whole=True, name="a/sizes.py")
    path = write("from sizes import WIDTH\ndef build_model(): return nn.Linear(4, WIDTH)", name="a/model.py")
    assert load_task(path).model().out_features == 6


def test_siblings_of_another_model_file_do_not_hide_ones_own(write):
    for folder, width in (("a", 6), ("b", 7)):
        write(f"WIDTH = {width}", whole=True, name=f"{folder}/sizes.py")
        write("from sizes import WIDTH\ndef build_model(): return nn.Linear(4, WIDTH)", name=f"{folder}/model.py")
    folder = write().parent
    assert load_task(folder / "a" / "model.py").model().out_features == 6
    assert load_task(folder / "b" / "model.py").model().out_features == 7


def test_a_file_that_was_edited_is_read_again(write):
    assert load_task(write("GLOBAL_BATCH = 4")).global_batch == 4
    assert load_task(write("GLOBAL_BATCH = 5")).global_batch == 5


def test_dataclasses_of_the_file_can_be_pickled_and_cross_from_data_loader_workers(load):
    task = load(
        """
        from __future__ import annotations
        from dataclasses import dataclass
        import torch

        @dataclass
        class Sample:
            x: torch.Tensor

        def build_model(): return torch.nn.Linear(4, 1)
        def train_dataset(): return [Sample(torch.ones(4)) for _ in range(4)]
        def collate_fn(samples): return Sample(torch.stack([sample.x for sample in samples]))
        """,
        whole=True,
    )
    batch = next(iter(DataLoader(task.dataset(), batch_size=4, num_workers=1, collate_fn=task.collate_fn)))
    assert pickle.loads(pickle.dumps(batch)).x.shape == (4, 4)


def test_code_under_the_main_guard_does_not_run_and_a_parser_sees_no_arguments(load, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autotune", "search", "--budget", "5m"])
    load(
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", default=3)
        args = parser.parse_args()
        if __name__ == "__main__":
            raise RuntimeError
        """
    )
    assert sys.argv == ["autotune", "search", "--budget", "5m"]


def test_names_close_to_ours_are_warned_about(load):
    task = load(
        """
        from torch.optim import Optimizer as configure_optimizer
        def trainin_step(model, batch): ...
        GLOBAL_BATCH_SIZE = 4
        """
    )
    assert sorted(warning.split()[0] for warning in task.origin.warnings) == ["GLOBAL_BATCH_SIZE", "trainin_step"]
    assert "training_step" in "".join(task.origin.warnings)


def test_where_no_default_loss_fits_a_misspelt_training_step_is_named(load):
    task = load("def trainin_step(model, batch): ...")
    with pytest.raises(TaskError, match=r"no default loss fits(?s:.*)trainin_step in the model file is not used"):
        task.loss(task.build_model(), (torch.zeros(3, 4), torch.zeros(3, 7)))


def test_no_such_file_offers_near_names(write):
    folder = write(name="modle.py").parent
    refused(folder / "model.py", "model.py", "did you mean modle.py", "autotune init")


def test_no_such_folder_is_said(tmp_path):
    refused(tmp_path / "nowhere" / "model.py", "nowhere/model.py", "nor a folder", "autotune init")


def test_a_folder_is_not_a_model_file(write):
    folder = write().parent
    refused(folder, str(folder), "is a folder", "model.py")


def test_a_file_that_is_not_python_is_refused(tmp_path):
    (tmp_path / "model.txt").write_text("")
    refused(tmp_path / "model.txt", "model.txt", ".py")


def test_a_syntax_error_shows_the_users_line(write):
    error = refused(
        write("def training_step(model, batch:\n    pass"),
        "model.py",
        "line 10",
        "`def training_step(model, batch:`",
        "correct",
    )
    assert "training_step" in error.frames and "loading.py" not in error.frames


def test_a_syntax_error_in_a_sibling_names_that_file(write):
    write("x = (", whole=True, name="net.py")
    refused(write("import net"), "importing model.py", "net.py", "line 1", "`x = (`")


def test_a_missing_module_says_what_to_install_and_where(write):
    error = refused(write("import torchvission"), "No module named 'torchvission'", "line 10", "install torchvission")
    assert "import torchvission" in error.frames and "importlib" not in error.frames


def test_an_exception_at_import_shows_the_users_frames_only(write):
    error = refused(
        write("def helper(): return {}['vocabulary']\nhelper()"),
        "KeyError",
        "vocabulary",
        "model.py, line 10",
        "correct",
    )
    assert error.frames.count("File ") == 2 and "in helper" in error.frames


def test_sys_exit_at_import_is_refused(write):
    refused(write("import sys; sys.exit(3)"), "sys.exit(3)", "line 10", "__main__")


def test_a_failed_import_leaves_no_module_behind(write):
    path = write("1 / 0")
    refused(path, "ZeroDivisionError")
    assert not [module for module in sys.modules.values() if getattr(module, "__file__", None) == str(path)]


def test_an_interrupt_at_import_is_not_an_error_of_the_file(write):
    with pytest.raises(KeyboardInterrupt):
        load_task(write("raise KeyboardInterrupt"))


def test_a_failed_allocation_at_import_goes_through(write):
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        load_task(write("torch.empty(2**60, dtype=torch.uint8)"))


def test_a_missing_build_model_offers_near_names(write):
    path = write("def buildmodel(): ...\ndef make_batch(batch_size): ...", whole=True)
    refused(path, "build_model()", "did you mean buildmodel", "autotune init")


def test_a_missing_make_batch_offers_near_names(write, monkeypatch):
    for name in ("lightning", "pytorch_lightning"):  # where it is in use, the model may bring its data
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = write("def build_model(): ...\ndef makebatch(batch_size): ...", whole=True)
    refused(path, "make_batch(batch_size)", "train_dataset()", "did you mean makebatch", "write one of them")


def test_a_task_under_another_name_is_offered(write):
    path = write("import autotune\nmine = autotune.Task(build_model=print, make_batch=print)", whole=True)
    refused(path, "model.py:mine")


def test_an_attribute_that_is_missing_or_no_task_is_refused(write):
    path = write("import autotune\nmine = autotune.Task(build_model=build_model, make_batch=make_batch)")
    refused(f"{path}:mne", "mne", "did you mean mine", "define")
    refused(f"{path}:build_model", "build_model", "function", "mine", "leave the name out")


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        ("def build_model(width): ...", "build_model()"),
        ("def make_batch(): ...", "make_batch(batch_size)"),
        ("def make_batch(batch_size, extra): ...", "make_batch(batch_size)"),
        ("def training_step(batch): ...", "training_step(model, batch)"),
        ("def training_step(model, batch, *, step): ...", "training_step(model, batch)"),
        ("def configure_optimizers(): ...", "configure_optimizers(model)"),
        ("def train_dataset(split): ...", "train_dataset()"),
        ("def collate_fn(): ...", "collate_fn(samples)"),
        ("def checkpoint_blocks(): ...", "checkpoint_blocks(model)"),
        ("def loss_weight(): ...", "loss_weight(batch)"),
    ],
)
def test_a_wrong_signature_is_refused_with_the_right_one(write, definition, expected):
    own = definition.removeprefix("def ").removesuffix(": ...")
    refused(write(definition), own, "line 10", f"cannot be called as {expected}", "change its parameters")


def test_further_parameters_with_defaults_are_fine(load):
    load("def make_batch(size, width=4): return torch.zeros(size, width)\ndef training_step(m, b, **more): ...")


def test_a_name_of_ours_that_is_no_function_is_refused(write):
    refused(write("training_step = 0.1"), "training_step is 0.1", "def training_step(model, batch)")


@pytest.mark.parametrize("value", ["0", "-4", "2.5", "True", "'8'"])
def test_a_global_batch_that_is_no_positive_whole_number_is_refused(write, value):
    refused(write(f"GLOBAL_BATCH = {value}"), f"GLOBAL_BATCH in a model file) is {value}", "at least 1", "leave it out")


@pytest.mark.parametrize("value", ["32", "['batch_size']", "{'batch_size': 2.5}", "{3: 4}"])
def test_a_baseline_that_is_no_config_dict_is_refused(write, value):
    refused(write(f"BASELINE = {value}"), "BASELINE", value.strip("{}"), '{"batch_size": 32', "leave it out")


@pytest.mark.parametrize("value", ["0", "-1.0", "'1'", "float('nan')", "True"])
def test_a_max_grad_norm_that_is_no_positive_number_is_refused(write, value):
    refused(write(f"MAX_GRAD_NORM = {value}"), "MAX_GRAD_NORM", str(eval(value)), "positive number", "leave it out")


def test_an_invalid_task_made_in_the_file_shows_where(write):
    error = refused(
        write("import autotune\nt = autotune.Task(build_model=build_model, make_batch=3)"),
        "make_batch is 3",
        "importing",
    )
    assert "line 11" in error.frames


def test_a_task_without_data_cannot_be_made():
    with pytest.raises(TaskError, match="neither make_batch"):
        Task(build_model=torch.nn.Identity)
