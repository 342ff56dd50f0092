import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import types

import pytest
import torch

from autotune.errors import TaskError
from autotune.task import Task, load_task
from autotune.task.loading import load_source
from autotune.task.source import TaskSource, source_hash

ELSEWHERE = """
import json, sys
from autotune.task.loading import load_source
from autotune.task.source import TaskSource, source_hash
task = load_source(TaskSource.from_dict(json.load(sys.stdin)))
model = task.model()
loss = task.loss(model, task.batch(2))
print(json.dumps([task.name, task.global_batch, loss.item(), source_hash(task)]))
"""


def load_elsewhere(source, cwd):
    """Load a source in another process that starts in another folder; returns name, global batch, loss and hash."""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=json.dumps(source.to_dict()), cwd=cwd, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_path_is_kept_absolute_and_not_run(write, monkeypatch):
    path = write("1 / 0")
    monkeypatch.chdir(path.parent)
    source = TaskSource.of("model.py:mine")
    assert (source.path, source.attribute, source.label) == (str(path), "mine", "model.py")


def test_what_names_a_task_to_a_command_names_its_attribute(load, write, monkeypatch):
    path = write("import autotune\nmine = autotune.Task(build_model=build_model, make_batch=make_batch)\n")
    monkeypatch.chdir(path.parent)
    assert TaskSource.of("model.py").spec == "model.py"
    assert TaskSource.of("model.py:mine").spec == "model.py:mine"
    monkeypatch.chdir(write("", whole=True, name="elsewhere/other.py").parent)
    assert TaskSource.of("../model.py:mine").spec == f"{path}:mine"
    assert TaskSource.of(f"{path}:mine").spec == f"{path}:mine"
    task = load_task(f"{path}:mine")
    assert TaskSource.of(dataclasses.replace(task, global_batch=4, baseline={"batch_size": 2})).spec == f"{path}:mine"


def test_nothing_names_a_task_that_was_built_or_changed_in_python(load):
    task = load("GLOBAL_BATCH = 8")
    for changes in ({"training_step": lambda model, batch: 0}, {"max_grad_norm": 1.0}, {"global_batch": None}):
        assert TaskSource.of(dataclasses.replace(task, **changes)).spec == ""


def test_a_path_to_nothing_is_refused(tmp_path):
    with pytest.raises(TaskError, match="no file"):
        TaskSource.of(tmp_path / "model.py")


def test_a_source_survives_json(load):
    for source in (TaskSource.of(load()), TaskSource(pickled="/c/task.pt", digest="d", sys_path=("/a",), cwd="/b")):
        assert TaskSource.from_dict(json.loads(json.dumps(source.to_dict()))) == source


def test_a_loaded_task_remembers_its_file(load, tmp_path):
    source = TaskSource.of(load("GLOBAL_BATCH = 8"))
    assert source == dataclasses.replace(TaskSource.of(tmp_path / "model.py"), sys_path=source.sys_path)


def test_constants_changed_since_travel_beside_the_path(load, tmp_path):
    task = dataclasses.replace(load("GLOBAL_BATCH = 8"), global_batch=12)
    source = TaskSource.of(task)
    assert source.path and source.overrides == {"global_batch": 12}
    name, global_batch, _, digest = load_elsewhere(source, tmp_path)
    assert (name, global_batch) == (task.name, 12)
    assert digest == load_elsewhere(dataclasses.replace(source, overrides={}), tmp_path)[3]


def test_a_task_built_in_python_of_a_model_files_functions_goes_to_another_process(load, tmp_path):
    scale = 1234.0
    task = dataclasses.replace(load(), training_step=lambda model, batch: model(batch[0]).mean() * 0 + scale)
    source = TaskSource.of(task)
    assert source.live is not None and not source.path and "Python" in source.label
    assert load_elsewhere(source.hand_over(tmp_path), tmp_path)[2] == scale


def test_a_task_that_was_handed_over_goes_on_as_the_same_source(tmp_path):
    source = TaskSource.of(Task(build_model=torch.nn.Identity, make_batch=torch.zeros)).hand_over(tmp_path)
    task = load_source(source)
    assert TaskSource.of(task) == source
    assert TaskSource.of(dataclasses.replace(task, global_batch=4)).overrides == {"global_batch": 4}
    assert source_hash(dataclasses.replace(task, global_batch=4)) == source_hash(source)


def test_a_task_that_cannot_be_pickled_is_refused_with_what_to_do(tmp_path):
    lock = threading.Lock()
    source = TaskSource.of(Task(build_model=lambda: lock, make_batch=torch.zeros))
    with pytest.raises(TaskError, match=r"cannot be sent to another process.*model.py"):
        source.hand_over(tmp_path)


def test_tensors_that_share_memory_are_handed_over_once(tmp_path):
    """Samples that are rows of one tensor would each bring the whole of it."""
    rows = list(torch.zeros(1000, 1000))
    handed = TaskSource.of(Task(build_model=torch.nn.Identity, train_dataset=lambda: rows)).hand_over(tmp_path)
    assert os.path.getsize(handed.pickled) < 6e6
    assert [row.storage_offset() for row in load_source(handed).dataset()[:3]] == [0, 1000, 2000]


def test_a_script_stands_for_the_task_that_it_builds(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("rate = 1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    source = TaskSource.of(Task(build_model=torch.nn.Identity, make_batch=torch.zeros))
    first = source.script_digest()
    assert first == source.script_digest() == source.hand_over(tmp_path).digest != ""
    script.write_text("rate = 2")
    assert source.script_digest() != first


def test_loading_goes_to_the_working_directory_of_the_source(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = TaskSource.of(load())
    monkeypatch.chdir("/")
    load_source(source)
    assert os.getcwd() == str(tmp_path)


def test_the_hash_changes_with_the_file_and_its_siblings_and_nothing_else(write):
    def hash_of(*, sibling, name="a/model.py", text="import sizes_for_hash"):
        sys.modules.pop("sizes_for_hash", None)
        folder = write(text, name=name).parent
        write(f"WIDTH = {sibling}", whole=True, name=f"{folder.name}/sizes_for_hash.py")
        write(f"UNUSED = {sibling}", whole=True, name=f"{folder.name}/unused.py")
        return source_hash(load_task(folder / "model.py"))

    first = hash_of(sibling=10)
    assert len(first) == 64
    assert first == hash_of(sibling=10)
    assert first == hash_of(sibling=10, name="b/model.py")
    assert first != hash_of(sibling=11)
    assert first != hash_of(sibling=10, text="import sizes_for_hash as sizes")


def test_two_tasks_of_one_file_have_two_hashes(write):
    path = write(
        "import autotune\n"
        "a = autotune.Task(build_model=build_model, make_batch=make_batch)\n"
        "b = autotune.Task(build_model=build_model, make_batch=make_batch)\n"
    )
    assert source_hash(load_task(f"{path}:a")) != source_hash(load_task(f"{path}:b"))


def test_the_hash_changes_with_a_package_that_lies_elsewhere(write, monkeypatch):
    """As of `pip install -e`: its folder is on the path, and neither the model file's nor one of installed packages."""
    path = write("import package_for_hash.layers", name="study/model.py")
    package = write("", whole=True, name="elsewhere/package_for_hash/__init__.py").parent
    monkeypatch.syspath_prepend(package.parent)

    def hash_of(width, unused=1):
        write(f"WIDTH = {width}", whole=True, name="elsewhere/package_for_hash/layers.py")
        write(f"UNUSED = {unused}", whole=True, name="elsewhere/package_for_hash/unused.py")
        return source_hash(load_task(path))

    first = hash_of(10)
    assert first == hash_of(10, unused=2)
    assert first != hash_of(11)


def test_the_hash_of_a_task_built_in_python_changes_with_what_it_imports(write, monkeypatch):
    module = write(name="elsewhere/parts_for_hash.py")
    monkeypatch.syspath_prepend(str(module.parent))
    import parts_for_hash

    source = TaskSource.of(Task(build_model=parts_for_hash.build_model, make_batch=parts_for_hash.make_batch))
    first = source_hash(source)
    assert first == source_hash(source)
    write("WIDTH = 7", name="elsewhere/parts_for_hash.py")
    assert first != source_hash(source)


def test_the_hash_leaves_out_what_installed_packages_write_and_import(write, load, monkeypatch):
    """Such as the kernels of `torch.compile`, which lie in a cache and hold paths, and other tasks' model files."""
    task = load()
    before = source_hash(task)
    generated = types.ModuleType("torch.generated_for_hash")
    generated.__file__ = str(write("", whole=True, name="cache/generated_for_hash.py"))
    monkeypatch.setitem(sys.modules, generated.__name__, generated)
    startup = types.ModuleType("sitecustomize")
    startup.__file__ = str(write("", whole=True, name="helpers/sitecustomize.py"))
    monkeypatch.setitem(sys.modules, startup.__name__, startup)
    load_task(write(name="other/model.py"))
    assert source_hash(task) == before


def test_the_hash_of_a_file_and_its_siblings_is_the_one_that_recorded_tables_hold(write, tmp_path):
    """`autotune sweep` carries on with a table of the same hash only, so how it is made must not change."""
    path = write("import sizes_for_hash")
    sibling = write("WIDTH = 10", whole=True, name="sizes_for_hash.py")
    digest = hashlib.sha256(b"\0")
    for file in (path, sibling):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    assert load_elsewhere(TaskSource.of(path), tmp_path)[3] == digest.hexdigest()
