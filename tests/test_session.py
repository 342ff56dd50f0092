import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune import prepare
from autotune.devices.cpu import CpuDevice
from autotune.errors import ConfigError, DeviceError, TaskError
from autotune.records.config import World
from autotune.records.inspection import Support
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.techniques.base import Phase, Switch

torch.set_num_threads(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def pairs(batch_size):
    return torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def task_of(**changes):
    return Task(**{"build_model": mlp, "make_batch": pairs, "configure_optimizers": sgd, **changes})


def in_double(**changes):
    def make_batch(batch_size):
        x, y = pairs(batch_size)
        return x.double(), y

    return task_of(build_model=lambda: mlp().double(), make_batch=make_batch, **changes)


def gradients_after(task, config, batch):
    torch.manual_seed(0)
    session = prepare(task, config, device="cpu")
    loss = session.accumulate(batch)
    return loss, [p.grad for p in session.model.parameters()]


def assert_equal_in_double(task, whole_config, split_config, batch):
    whole_loss, whole = gradients_after(task, whole_config, batch)
    loss, gradients = gradients_after(task, split_config, batch)
    torch.testing.assert_close(loss, whole_loss, rtol=1e-12, atol=0)
    for expected, gradient in zip(whole, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("batch_size", "steps"), [(6, 2), (4, 3), (1, 12)])
def test_accumulated_gradients_are_those_of_the_whole_batch(batch_size, steps):
    task = in_double()
    config = {"batch_size": batch_size, "accumulation_steps": steps}
    assert_equal_in_double(task, {"batch_size": 12}, config, task.batch(12))


def test_an_incomplete_last_group_is_the_mean_over_its_samples():
    task = in_double()
    assert_equal_in_double(task, {"batch_size": 12}, {"batch_size": 4, "accumulation_steps": 3}, task.batch(9))


def test_micro_batches_with_unequal_numbers_of_tokens_are_weighted():
    def make_batch(batch_size):
        lengths = torch.arange(batch_size) % 5 + 1
        labels = torch.randint(0, 3, (batch_size, 5)).masked_fill(torch.arange(5) >= lengths[:, None], -100)
        return torch.randn(batch_size, 5, 6).double(), labels

    def training_step(model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def loss_weight(batch):
        return float((batch[1] != -100).sum())

    task = task_of(
        build_model=lambda: mlp().double(), make_batch=make_batch, training_step=training_step, loss_weight=loss_weight
    )
    config = {"batch_size": 3, "accumulation_steps": 3}
    assert_equal_in_double(task, {"batch_size": 8}, config, task.batch(8))


def partly_labelled(batch_size):
    x, y = pairs(batch_size)
    return x.double(), y.masked_fill(torch.arange(batch_size) // 3 == 1, -100)  # the second three have no label


def test_micro_batches_without_a_label_are_left_out():
    task = in_double()
    config = {"batch_size": 3, "accumulation_steps": 4}
    assert_equal_in_double(task, {"batch_size": 12}, config, partly_labelled(12))


@pytest.mark.parametrize("amp", ["off", "fp16"])
@pytest.mark.parametrize("no_label", ["first", "last"])
def test_training_goes_on_past_micro_batches_without_a_label(amp, no_label):
    session = prepare(task_of(), {"batch_size": 4, "accumulation_steps": 2, "amp": amp}, device="cpu")
    x, y = pairs(8)
    y[:4] = -100 if no_label == "first" else y[:4]
    y[4:] = -100 if no_label == "last" else y[4:]
    before = [p.detach().clone() for p in session.model.parameters()]
    for _ in range(20):
        assert session.step((x, y)).isfinite()
    assert all(p.isfinite().all() for p in session.model.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(before, session.model.parameters(), strict=True))


@pytest.mark.parametrize("amp", ["off", "fp16"])
@pytest.mark.parametrize("micro", [4, 8])
def test_a_step_without_any_label_is_that_of_plain_training(amp, micro):
    config = {"batch_size": micro, "accumulation_steps": 8 // micro, "amp": amp}
    session = prepare(task_of(), config, device="cpu")
    x, y = pairs(8)
    before = [p.detach().clone() for p in session.model.parameters()]
    assert session.step((x, torch.full_like(y, -100))).isnan()  # torch's mean over nothing; its gradient is zero
    assert all(torch.equal(p, q) for p, q in zip(before, session.model.parameters(), strict=True))
    assert session.step((x, y)).isfinite()


def test_a_step_changes_the_parameters_clears_the_gradients_and_returns_the_mean_loss():
    session = prepare(task_of(), {"batch_size": 4}, device="cpu")
    batch = session.task.batch(4)
    expected = session.loss(batch).detach()
    before = [p.detach().clone() for p in session.model.parameters()]
    loss = session.step(batch)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    assert all(p.grad is None for p in session.model.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(before, session.model.parameters(), strict=True))


@pytest.mark.arithmetic
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_gradients_are_clipped_after_unscaling(amp):
    session = prepare(task_of(max_grad_norm=1e-3), {"batch_size": 4, "amp": amp}, device="cpu")
    before = [p.detach().clone() for p in session.model.parameters()]
    session.step(session.task.batch(4))
    moved = torch.cat([(p - q).flatten() for p, q in zip(before, session.model.parameters(), strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3 * 0.1), rtol=1e-3, atol=0)


def test_only_fp16_has_a_scaler():
    scalers = [prepare(task_of(), {"amp": amp}, device="cpu").scaler for amp in ("off", "bf16", "fp16")]
    assert scalers[0] is scalers[1] is None
    assert isinstance(scalers[2], torch.amp.GradScaler)


def test_fp16_steps_that_overflow_are_skipped_and_training_goes_on():
    def training_step(model, batch):
        return functional.cross_entropy(model(batch[0] * 100).float() * 100, batch[1])

    session = prepare(task_of(training_step=training_step), {"batch_size": 8, "amp": "fp16"}, device="cpu")
    before = [p.detach().clone() for p in session.model.parameters()]
    for _ in range(20):
        session.step(session.task.batch(8))
    assert session.scaler.get_scale() < 65536
    assert all(p.isfinite().all() for p in session.model.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(before, session.model.parameters(), strict=True))


def test_accumulation_follows_from_the_global_batch():
    session = prepare(task_of(global_batch=12), {"batch_size": 4}, device="cpu")
    assert session.config.accumulation_steps == 3


def test_the_global_batch_never_moves_silently():
    with pytest.raises(ConfigError, match="is 8 samples per optimizer step, but the global batch is 12"):
        prepare(task_of(global_batch=12), {"batch_size": 4, "accumulation_steps": 2}, device="cpu")
    with pytest.raises(ConfigError, match="does not divide the global batch 12"):
        prepare(task_of(global_batch=12), {"batch_size": 5}, device="cpu")


@pytest.mark.parametrize(
    ("config", "named"),
    [({"batchsize": 4}, "batch_size"), ({"amp": "fp8"}, "off, bf16, fp16"), ({"batch_size": 0}, "at least 1")],
)
def test_a_config_that_makes_no_sense_is_an_error_that_helps(config, named):
    with pytest.raises(ConfigError, match=named):
        prepare(task_of(), config, device="cpu")


def test_the_device_is_entered_before_anything_is_built():
    seen = []

    class Entered(CpuDevice):
        def enter(self):
            seen.append("entered")

    def build_model():
        seen.append("built")
        return mlp()

    prepare(task_of(build_model=build_model), {"batch_size": 2}, device=Entered())
    assert seen == ["entered", "built"]


def test_an_unknown_device_is_an_error():
    with pytest.raises(DeviceError):
        prepare(task_of(), {}, device="tpu")


def test_a_model_file_is_taken_by_its_path(tmp_path):
    path = tmp_path / "the model é.py"
    source = "import torch\n\n\ndef build_model():\n    return torch.nn.Linear(6, 3)\n\n\n" + inspect.getsource(pairs)
    path.write_text(source.replace("def pairs", "def make_batch"), encoding="utf-8")
    session = prepare(path, {"batch_size": 2}, device="cpu")
    session.step(next(iter(session.loader)))
    assert isinstance(session.optimizer, torch.optim.AdamW)


@pytest.mark.arithmetic
def test_all_techniques_at_once_train_like_plain_fp32():
    def build():
        blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(3 * 16, 3))

    def make_batch(batch_size):
        return torch.randn(batch_size, 3, 4, 4), torch.randint(0, 3, (batch_size,))

    task = Task(build_model=build, make_batch=make_batch, global_batch=8)
    everything = {"batch_size": 2, "channels_last": True, "checkpoint_segments": 2, "optimizer_impl": "fused"}
    torch.manual_seed(1)
    batch = task.batch(8)
    losses = []
    for config in ({"batch_size": 8}, everything, {**everything, "amp": "bf16"}):
        torch.manual_seed(0)
        session = prepare(task, config, device="cpu")
        losses.append([float(session.step(copy.deepcopy(batch))) for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=2e-2)


def test_another_global_batch_than_the_tasks_own_can_be_prepared():
    config = {"batch_size": 4, "accumulation_steps": 6}
    with pytest.raises(ConfigError, match=r"is 24 samples .* global batch is 12;.* global_batch=24"):
        prepare(task_of(global_batch=12), config, device="cpu")
    session = prepare(task_of(global_batch=12), config, device="cpu", global_batch=24)
    assert sum(len(x) for x, _ in next(iter(session.loader))) == 24
    assert session.config.samples_per_step == session.task.global_batch == 24
    assert prepare(task_of(global_batch=12), {"batch_size": 4}, device="cpu", global_batch=24).config == session.config


def test_the_terms_of_a_lone_micro_batch_are_not_counted_which_would_wait_for_the_device():
    def loss_weight(batch):
        raise AssertionError("counted")

    task = task_of(loss_weight=loss_weight)
    session = prepare(task, {"batch_size": 4}, device="cpu")
    assert session.step(task.batch(4)).isfinite()


def test_a_model_is_spread_once_it_is_changed_and_before_it_has_an_optimizer(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "autotune.session._apply",
        lambda build, techniques, phase: seen.append((phase, hasattr(build, "model"), hasattr(build, "optimizer"))),
    )
    monkeypatch.setattr("autotune.session.join", lambda *_: None)
    monkeypatch.setattr("autotune.session.start_equal", lambda *_: None)
    monkeypatch.setattr("autotune.session.Together", lambda *_: SimpleNamespace(largest=lambda value: value))
    monkeypatch.setattr("autotune.session.copies_of", lambda build: None)
    prepare(task_of(), {}, device="cpu", world=World(size=2), on_oom="raise")
    phases = [phase for phase, _, _ in seen]
    assert phases == sorted(Phase) and (Phase.SPREAD, True, False) in seen

    class Spread(Switch):
        name, phase = "spread", Phase.SPREAD

        def support(self, setting):
            return Support(choices=self.choices)

        def apply(self, build, choice):
            pass

    assert Spread().reaches_into_step and Spread().shapes_memory


def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))


def image_task():
    def make_batch(batch_size):
        return torch.randn(batch_size, 3, 8, 8), torch.randint(0, 3, (batch_size,))

    return Task(build_model=images, make_batch=make_batch)


IN_PLAIN, IN_ANOTHER_WAY = {}, {"optimizer_impl": "fused", "channels_last": True}


@pytest.mark.parametrize("amp", ["off", "fp16"])
@pytest.mark.parametrize(("saved", "resumed"), [(IN_PLAIN, IN_ANOTHER_WAY), (IN_ANOTHER_WAY, IN_PLAIN)])
def test_what_another_config_saved_is_gone_on_with_in_the_way_of_the_own(saved, resumed, amp):
    task = image_task()
    torch.manual_seed(0)
    batches = [task.batch(4) for _ in range(3)]
    before, expected, after = (
        prepare(task, {"batch_size": 4, "amp": amp, **config}, device="cpu") for config in (saved, saved, resumed)
    )
    for group in before.optimizer.param_groups:
        group["lr"] = 0.01
    while not before.optimizer.state:  # a scaler's first scale overflows
        before.step(batches[0])
    state = copy.deepcopy(before.state_dict())
    expected.load_state_dict(copy.deepcopy(state))
    after.load_state_dict(state)
    assert bool(after.optimizer.param_groups[0]["fused"]) is ("optimizer_impl" in resumed)
    assert after.optimizer.param_groups[0]["lr"] == 0.01
    for parameter, moments in after.optimizer.state.items():
        assert moments["exp_avg"].stride() == moments["exp_avg_sq"].stride() == parameter.stride()
    for batch in batches[1:]:
        assert float(after.step(batch)) == pytest.approx(float(expected.step(batch)), rel=1e-2)
    for ours, theirs in zip(after.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3 if amp == "fp16" else 1e-5)


@pytest.fixture
def settings():
    with find_techniques().keep_settings():
        yield


IN_TF32 = {"batch_size": 4, "matmul_precision": "tf32"}


@pytest.mark.usefixtures("settings")
def test_what_a_config_switches_on_for_the_process_ends_when_the_next_session_is_prepared():
    torch.set_float32_matmul_precision("medium")  # as the script has it
    prepare(task_of(), IN_TF32, device="cpu")
    assert torch.get_float32_matmul_precision() == "high"
    prepare(task_of(), {"batch_size": 4}, device="cpu")
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("high")
    prepare(task_of(), {"batch_size": 4}, device="cpu")
    assert torch.get_float32_matmul_precision() == "high", "the session before had not switched it on"


@pytest.mark.usefixtures("settings")
def test_what_the_script_sets_itself_stays_when_the_session_ends(tmp_path):
    prepare(task_of(), IN_TF32, device="cpu")
    torch.set_float32_matmul_precision("medium")
    prepare(task_of(), {"batch_size": 4}, device="cpu")
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    prepare(task_of(), IN_TF32, device="cpu")
    file = tmp_path / "model.py"
    sets = "import torch\ntorch.set_float32_matmul_precision('high')\n"
    file.write_text(
        f"{sets}build_model = lambda: torch.nn.Linear(2, 2)\nmake_batch = lambda n: (torch.rand(n, 2),) * 2\n"
    )
    prepare(file, {"batch_size": 4}, device="cpu")
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.usefixtures("settings")
def test_a_file_that_cannot_be_loaded_takes_nothing_from_the_session_that_trains(tmp_path, caplog):
    session = prepare(task_of(), IN_TF32, device="cpu")
    file = tmp_path / "model.py"
    file.write_text("import torch\ntorch.set_float32_matmul_precision('medium')\nbuild_model = missing\n")
    with pytest.raises(TaskError):
        prepare(file, {"batch_size": 4}, device="cpu")
    assert torch.get_float32_matmul_precision() == "high"
    session.step(session.task.batch(4))
    assert not caplog.records
    prepare(task_of(), {"batch_size": 4}, device="cpu")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("settings")
def test_a_task_made_beside_a_session_brings_what_the_script_has_set_and_nothing_of_the_sessions_own():
    before = TaskSource.of(task_of()).settings
    prepare(task_of(), IN_TF32, device="cpu")
    torch.backends.cudnn.benchmark = True
    assert TaskSource.of(task_of()).settings == {**before, "cudnn.benchmark": True}
    torch.set_float32_matmul_precision("medium")
    assert TaskSource.of(task_of()).settings["float32_matmul_precision"] == "medium"


@pytest.mark.usefixtures("settings")
def test_a_session_that_goes_on_with_what_a_later_one_switched_on_for_the_process_says_so_once(caplog):
    first = prepare(task_of(), IN_TF32, device="cpu")
    second = prepare(task_of(), {"batch_size": 4}, device="cpu")
    batch = first.task.batch(4)
    second.step(batch)
    assert not caplog.records
    for _ in range(2):
        first.step(batch)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "goes on with nothing switched on for the whole process, in place of matmul_precision=tf32" in said
    third = prepare(task_of(), {"batch_size": 4}, device="cpu")
    second.step(batch)
    third.step(batch)
    assert len(caplog.records) == 1, "these are alike in it"
