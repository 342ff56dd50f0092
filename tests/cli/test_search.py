"""`autotune search`, end to end: real processes, real SQLite, real limits."""

import json
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

import autotune
from autotune.units import format_bytes
from tests.room import limit_bytes
from tests.short_play_off import AUTOTUNE

MODELS = Path(__file__).parent.parent / "models"
MEASURED = Path("studies") / ".calibration"
NAME = "mein größtes Modell 模型"
FIELDS = {
    "config", "samples_per_s", "samples_per_s_ci", "peak_bytes", "memory_limit_bytes", "baseline", "speedup", "verdict",
    "outcomes", "probes", "wall_s", "first_probe_s", "split_s", "train_s", "storage", "study", "warnings",
}  # fmt: skip


def command(*arguments):
    return [*AUTOTUNE, *map(str, arguments)]


def run(*arguments, cwd, timeout=100, **options):
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=timeout, **options)


def search(*arguments, cwd, **options):
    """A short search; returns the parsed JSON document."""
    done = run("search", *arguments, "--json", "--device", "cpu", cwd=cwd, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def processes_with(text):
    found = subprocess.run(["pgrep", "-f", text], capture_output=True, text=True)
    return [line for line in found.stdout.split() if int(line) != os.getpid()]


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """One finished search of a small model, in a folder of its own. It ends when the play-off is decided, long before the time."""
    folder = tmp_path_factory.mktemp("answered")
    shutil.copy(MODELS / "steady.py", folder)
    return folder, search("steady.py", "--budget", "150s", "--trials", "5", cwd=folder, timeout=200)


@pytest.fixture(autouse=True)
def measured(answered, tmp_path):
    """Every other search finds this machine measured, which takes 3 s."""
    if (kept := answered[0] / MEASURED).exists():  # what was measured beside other work is not kept
        shutil.copytree(kept, tmp_path / MEASURED)


def test_the_json_has_every_field_that_is_promised(answered):
    _, result = answered
    assert result.keys() >= FIELDS
    assert result["baseline"].keys() >= {"config", "samples_per_s", "samples_per_s_ci", "peak_bytes"}


def test_the_device_was_measured_and_the_answer_says_how_near_its_limits_it_runs(answered):
    folder, result = answered
    if not list(folder.glob("studies/.calibration/*.json")) or not list(folder.glob("studies/.traces/*.json")):
        pytest.skip("this machine was too busy to be measured, or to trace the model")
    use = result["use"]
    assert use["arithmetic"] in ("fp32", "bf16", "fp16")
    assert 0 < use["flops_share"] < 2 and use["flops_per_s"] > 0 and use["bandwidth_share"] > 0


def test_the_memory_of_baseline_and_answer_is_told_by_kind(answered):
    folder, result = answered
    if not any(json.loads(file.read_text())["updates"] for file in folder.glob("studies/.traces/*.json")):
        pytest.skip("this machine was too busy to trace the model")
    for kinds in result["peak_by_kind"].values():
        assert kinds.keys() == {"parameters", "gradients", "optimizer", "activations", "temporaries"}
        assert kinds["gradients"] <= kinds["parameters"] < sum(kinds.values()) < result["memory_limit_bytes"]
    assert "baseline" in result["peak_by_kind"]


def test_the_answer_keeps_the_global_batch(answered):
    _, result = answered
    assert result["config"]["batch_size"] * result["config"]["accumulation_steps"] == 48


def test_the_answer_states_a_speed_up_with_an_interval_that_holds_it(answered):
    _, result = answered
    kept = result["config"] == result["baseline"]["config"]
    told = result["rival"] if kept else result
    low, high = told["speedup_ci"]
    assert low <= told["speedup"] <= high
    assert result["verdict"] in (("same", "undecided") if kept else ("faster", "same", "undecided"))
    assert bool(result["undecided"]) == (result["verdict"] == "undecided")


def test_the_answer_was_run_in_several_fresh_processes(answered):
    _, result = answered
    finalists = {json.dumps(finalist["config"]): finalist["num_processes"] for finalist in result["finalists"]}
    finalists[json.dumps(result["baseline"]["config"])] = result["baseline"]["num_processes"]
    assert finalists[json.dumps(result["config"])] >= 2


def test_the_answers_gradients_were_compared_with_plain_fp32(answered):
    _, result = answered
    assert len(result["checks"]) == (result["config"] != result["baseline"]["config"])
    assert all(check["passed"] and check["gradient_cosine"] > 0.999 for check in result["checks"])


def test_the_study_is_where_it_is_said_to_be_and_holds_every_probe(answered):
    folder, result = answered
    study = autotune.load_study(folder / "studies" / "steady.db")
    assert result["storage"].endswith("studies/steady.db")
    assert len(study.frame()) == result["probes"] == sum(result["outcomes"].values())


def test_show_prints_the_study_as_text_json_and_csv(answered):
    folder, result = answered
    assert "samples/s" in run("show", "studies/steady.db", cwd=folder).stdout
    assert (
        json.loads(run("show", "studies/steady.db", "--json", cwd=folder).stdout)["result"]["config"]
        == result["config"]
    )
    assert run("show", "studies/steady.db", "--csv", cwd=folder).stdout.count("\n") == result["probes"] + 1


def test_verify_runs_the_answer_for_as_many_steps_as_asked(answered):
    folder, result = answered
    done = run("verify", "steady.py", "--config", json.dumps(result["config"]), "--steps", "30", "--json", cwd=folder)
    outcome = json.loads(done.stdout)
    assert done.returncode == 0
    assert outcome["kind"] == "ok"
    assert outcome["measurement"]["num_steps"] >= 30


def test_prepare_runs_exactly_the_config_of_the_answer(answered):
    folder, result = answered
    session = autotune.prepare(folder / "steady.py", result["config"], device="cpu")
    assert session.config.as_dict() == result["config"]
    loss = session.step(next(iter(session.loader)))
    assert loss.isfinite()


@pytest.mark.slow  # the test of `kill -9` goes on with a study too
def test_the_same_command_goes_on_with_the_study(answered):
    folder, result = answered
    again = search("steady.py", "--budget", "45s", "--trials", "2", cwd=folder)
    assert again["probes"] > result["probes"]


def test_a_study_of_another_machine_is_refused_and_the_difference_shown(answered):
    folder, _ = answered
    shutil.copytree(folder / "studies", folder / "foreign", dirs_exist_ok=True)
    with sqlite3.connect(folder / "foreign" / "steady.db") as database:
        database.execute(
            'UPDATE study_user_attributes SET value_json = replace(value_json, \'"device": "cpu\', \'"device": "abacus\')'
            " WHERE key = 'fingerprint'"
        )
    done = run("search", "steady.py", "--storage", "foreign/steady.db", "--device", "cpu", cwd=folder)
    assert done.returncode == 2
    assert "abacus" in done.stderr and "--study" in done.stderr


def test_a_search_over_a_model_with_every_fault_goes_on_to_a_right_answer(tmp_path):
    shutil.copy(MODELS / "faulty.py", tmp_path)
    fixed = (
        "amp=off",
        "optimizer_impl=default",
        "checkpoint_segments=0",
        "inplace_activations=false",
        "keep_heap=false",
    )
    fix = [part for name in fixed for part in ("--fix", name)]
    result = search(
        "faulty.py",
        "--budget",
        "60s",
        "--trials",
        "24",
        "--sampler",
        "grid",
        "--probe-timeout",
        "3s",
        "--memory-limit",
        str(limit_bytes(800)),
        *fix,
        cwd=tmp_path,
    )
    assert result["config"]["batch_size"] not in range(10, 26)
    assert result["outcomes"].keys() >= {"ok", "crashed", "error"}
    assert not processes_with("autotune-orphan")


@pytest.mark.slow  # `runners/test_local.py` holds it for a probe
def test_an_allocation_of_a_pebibyte_that_fails_does_not_end_the_search(tmp_path):
    shutil.copy(MODELS / "far_allocation.py", tmp_path)
    result = search("far_allocation.py", "--budget", "25s", "--trials", "4", "--memory-limit", "2GiB", cwd=tmp_path)
    assert result["outcomes"].keys() >= {"ok", "oom"}
    assert result["config"]["batch_size"] < 32


@pytest.mark.slow  # `runners/test_local.py` holds it for a probe
def test_nan_in_fp16_only_is_recorded_and_fp16_is_not_the_answer(tmp_path):
    shutil.copy(MODELS / "faulty.py", tmp_path)
    fixed = ("batch_size=4", "optimizer_impl=default", "checkpoint_segments=0", "inplace_activations=false")
    fix = [part for name in fixed for part in ("--fix", name)]
    result = search("faulty.py", "--budget", "30s", "--sampler", "grid", "--include", "amp", *fix, cwd=tmp_path)
    assert result["outcomes"]["nonfinite"]
    assert result["config"]["amp"] != "fp16"
    assert "ended with a value that is not finite: nan was first in the loss" in " ".join(result["warnings"])


def test_nothing_that_fits_exits_with_1_and_says_by_how_much(tmp_path):
    shutil.copy(MODELS / "tiny.py", tmp_path)
    text = (tmp_path / "tiny.py").read_text().replace("128", "6000")
    (tmp_path / "tiny.py").write_text(text)
    limit = limit_bytes(480)
    done = run("search", "tiny.py", "--memory-limit", str(limit), "--budget", "60s", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert format_bytes(limit) in done.stderr and "--memory-limit" in done.stderr


def test_a_study_in_use_is_refused(tmp_path):
    from autotune.study.place import lock_study, place_of

    shutil.copy(MODELS / "tiny.py", tmp_path)
    with lock_study(place_of(str(tmp_path / "studies" / "tiny.db"), None, "tiny")):
        done = run("search", "tiny.py", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "in use" in done.stderr and "--study" in done.stderr


@pytest.mark.slow  # `runners/test_local.py` holds it for a probe
def test_a_module_that_starts_threads_at_import_is_probed_in_new_interpreters(tmp_path):
    text = (MODELS / "tiny.py").read_text()
    text += "\nimport threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    text += "torch.randn(1000, 1000) @ torch.randn(1000, 1000)\n"
    (tmp_path / "tiny.py").write_text(text)
    done = run("search", "tiny.py", "--budget", "25s", "--trials", "1", "--json", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "new interpreter" in done.stderr
    assert json.loads(done.stdout)["outcomes"]["ok"]


@pytest.fixture(scope="module")
def of_a_leak(answered, tmp_path_factory):
    """A search of a model that keeps 4 MiB a step, in a file whose name needs quoting."""
    folder = tmp_path_factory.mktemp("leak")
    if (kept := answered[0] / MEASURED).exists():
        shutil.copytree(kept, folder / MEASURED)
    text = (MODELS / "tiny.py").read_text()
    text += """
KEPT = []
def training_step(model, batch):
    KEPT.append(torch.ones(1024 * 1024))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
GLOBAL_BATCH = None
"""
    (folder / f"{NAME}.py").write_text(text)
    fix = [
        part for name in ("batch_size=4", "optimizer_impl=default", "checkpoint_segments=0") for part in ("--fix", name)
    ]
    return search(f"{NAME}.py", "--budget", "60s", "--trials", "1", "--memory-limit", "4GiB", *fix, cwd=folder)


def test_a_leak_is_warned_of_in_bytes_per_step(of_a_leak):
    assert any("bytes) per optimizer step" in warning for warning in of_a_leak["warnings"])


def test_a_file_name_with_spaces_and_other_letters_works(of_a_leak):
    assert of_a_leak["study"] == NAME
