import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from autotune import prepare
from autotune.devices.cuda import CudaDevice
from autotune.records.device import Calibration, Rate
from autotune.techniques.amp import Amp
from tests.arithmetic import has_arithmetic

pytestmark = pytest.mark.arithmetic


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


def test_a_cpu_trains_in_bf16_where_it_is_asked_to(make_task, make_setting):
    support = Amp().support(make_setting(make_task(linear)))
    assert {"off", "bf16"} <= {*support.choices, *support.optional}


def calibration(**gflops: tuple[float, float]) -> Calibration:
    """Rates of matrix products and convolutions by type."""
    return Calibration(
        rates=tuple(
            Rate(
                work=work,
                arithmetic=name,
                sizes=(64,) * (rate > 0),
                flops_per_s=(rate * 1e9,) * (rate > 0),
                failure="hangs",
            )
            for name, rates in gflops.items()
            for work, rate in zip(("matmul", "convolution"), rates, strict=True)
        )
    )


def both() -> torch.nn.Module:
    """Nearly all of its work is convolutions."""
    convolutions = torch.nn.Conv2d(8, 64, 1), torch.nn.Conv2d(64, 64, 1)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (8, 1, 1)), *convolutions, torch.nn.Flatten(), torch.nn.Linear(64, 4)
    )


@pytest.mark.parametrize(
    ("model", "bf16", "choices", "optional"),
    [
        (linear, (150, 1), ("off", "bf16"), ()),
        (linear, (95, 1), ("off", "bf16"), ()),
        (linear, (20, 400), ("off",), ("bf16",)),
        (linear, (0, 400), ("off",), ()),
        (both, (20, 400), ("off", "bf16"), ()),
        (both, (400, 50), ("off",), ("bf16",)),
        (both, (400, 3), ("off",), ()),
        (both, (400, 0), ("off",), ()),
    ],
)
def test_a_type_is_offered_by_its_measured_rates_for_the_models_own_work(
    model, bf16, choices, optional, make_task, make_setting
):
    setting = make_setting(make_task(model))
    setting = replace(setting, calibration=calibration(fp32=(100, 100), bf16=bf16, fp16=(1, 1)))
    support = Amp().support(setting)
    assert tuple(choice for choice in support.choices if choice != "fp16") == choices
    assert tuple(choice for choice in support.optional if choice != "fp16") == optional
    assert ("bf16" in support.reason) is ("bf16" not in choices)


def test_what_is_slower_says_by_how_much_and_at_which_rates(make_task, make_setting):
    setting = replace(make_setting(make_task(linear)), calibration=calibration(fp32=(100, 1), bf16=(2, 1), fp16=(2, 1)))
    assert "bf16 is 50 times slower than fp32 here (matrix products: 2 GFLOP/s, in fp32 100 GFLOP/s)" in (
        Amp().support(setting).reason
    )


def test_an_old_gpu_that_is_fast_in_bf16_after_all_is_believed(make_task, make_setting):
    setting = replace(make_setting(make_task(linear)), device=OldGpu())
    rates = calibration(fp32=(100, 100), bf16=(200, 100), fp16=(50, 100))
    support = Amp().support(replace(setting, calibration=rates))
    assert (support.choices, support.optional) == (("off", "bf16"), ("fp16",))


def test_short_types_that_the_processor_only_emulates_are_optional_with_the_reason():
    program = (
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from autotune.devices import capabilities_of\n"
        "from autotune.records.device import NOT_MEASURED\n"
        "from autotune.techniques.amp import Amp\n"
        "device = SimpleNamespace(capabilities=capabilities_of('cpu'), torch_device=torch.device('cpu'))\n"
        "task = SimpleNamespace(takes_whole_steps=False)\n"
        "setting = SimpleNamespace(device=device, calibration=NOT_MEASURED, task=task, model=torch.nn.Linear(8, 4))\n"
        "support = Amp().support(setting)\n"
        "print(support.choices, support.optional, support.reason, sep='|')\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    choices, optional, reason = done.stdout.strip().split("|")
    assert choices == "('off',)"
    assert "bf16" in optional
    assert "no bf16" in reason and "emulating" in reason


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("choice", ["bf16", "fp16"])
def test_a_model_with_an_lstm_is_offered_what_torch_has_lstms_in(choice, make_task, make_setting):
    support = Amp().support(make_setting(make_task(Recurrent)))
    session = prepare(make_task(Recurrent), {"batch_size": 2, "amp": choice}, device="cpu")
    try:
        session.step(next(iter(session.loader)))
    except RuntimeError:
        assert choice not in (*support.choices, *support.optional) and f"no LSTM in {choice}" in support.reason
    else:
        assert choice in (*support.choices, *support.optional)


def test_bf16_autocasts_the_forward_pass_and_needs_no_scaler(make_task):
    seen = []

    def training_step(model, batch):
        output = model(batch[0])
        seen.append(output.dtype)
        return torch.nn.functional.cross_entropy(output.float(), batch[1])

    session = prepare(make_task(linear, training_step=training_step), {"batch_size": 2, "amp": "bf16"}, device="cpu")
    session.step(next(iter(session.loader)))
    assert seen == [torch.bfloat16]
    assert session.scaler is None
    assert all(p.dtype is torch.float32 for p in session.model.parameters())


def test_a_whole_step_of_the_users_own_sees_the_weights_that_it_has_just_updated(make_task):
    seen = []

    def train_step(model, optimizer, batch):
        ones = torch.ones_like(batch[0])
        before = model(ones)
        before.sum().backward()
        optimizer.step()
        seen.append((before, model(ones)))
        return before.sum()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    task = make_task(linear, train_step=train_step, configure_optimizers=sgd)
    session = prepare(task, {"batch_size": 2, "amp": "bf16"}, device="cpu")
    session.step(next(iter(session.loader)))
    ((before, after),) = seen
    assert before.dtype is after.dtype is torch.bfloat16
    assert (after < before - 1).all()


def test_fp16_has_a_scaler(make_task):
    session = prepare(make_task(linear), {"batch_size": 2, "amp": "fp16"}, device="cpu")
    assert isinstance(session.scaler, torch.amp.GradScaler)
    assert session.scaler.is_enabled()


class OldGpu:
    capabilities = CudaDevice.capabilities

    def info(self):
        return type("Info", (), {"capability": (7, 5)})()


def test_a_gpu_without_bfloat16_tensor_cores_gets_fp16_only(make_task, make_setting):
    setting = make_setting(make_task(linear))
    setting = type(setting)(**{**vars(setting), "device": OldGpu()})
    support = Amp().support(setting)
    assert support.choices == ("off", "fp16")
    assert "8.0" in support.reason and "7.5" in support.reason


@pytest.mark.parametrize("choice", ["bf16", "fp16"])
def test_what_a_cpu_emulates_cannot_be_traced_for_it(choice):
    reason = Amp().untraceable(choice, "cpu")
    assert (reason == "") is has_arithmetic(choice)
    assert has_arithmetic(choice) or f"emulates {choice}" in reason
    assert Amp().untraceable(choice, "cuda") == ""


@pytest.mark.parametrize("choice", ["float16", True, 16, None])
def test_other_names_are_refused(choice):
    with pytest.raises(ValueError, match="off, bf16, fp16"):
        Amp().validate(choice)
