import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.techniques import UnsupportedError
from autotune.techniques.optimizer_impl import OptimizerImpl, current_implementation


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def grouped(model):
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2, "lr": 3e-3},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.8, 0.95),
    )


def trained(task, implementation):
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 4, "optimizer_impl": implementation}, device="cpu")
    torch.manual_seed(1)
    batch = task.batch(4)
    for _ in range(3):
        session.step(batch)
    return session


OPTIMIZERS = {
    "AdamW in groups": grouped,
    "Adam with amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1),
    "by name": lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2),
}


@pytest.mark.parametrize("configure", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_every_implementation_trains_the_same(make_task, configure, implementation):
    task = make_task(mlp, configure_optimizers=configure)
    default, other = trained(task, "default"), trained(task, implementation)
    for expected, parameter in zip(default.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


def test_groups_and_their_settings_stay(make_task):
    session = prepare(make_task(mlp, configure_optimizers=grouped), {"optimizer_impl": "fused"}, device="cpu")
    optimizer = session.optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (3e-3, 0.2, (0.8, 0.95)),
        (1e-3, 0.0, (0.8, 0.95)),
    ]
    parameters = list(session.model.parameters())
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], (parameters[0], parameters[2]), strict=True))
    assert all(g["fused"] and not g["foreach"] for g in optimizer.param_groups)


def test_grad_scaler_learns_whether_the_optimizer_unscales(make_task):
    fused = prepare(make_task(mlp), {"optimizer_impl": "fused"}, device="cpu").optimizer
    assert fused._step_supports_amp_scaling
    users_fused = make_task(mlp, configure_optimizers=lambda m: torch.optim.AdamW(m.parameters(), fused=True))
    loop = prepare(users_fused, {"optimizer_impl": "for-loop"}, device="cpu").optimizer
    assert not hasattr(loop, "_step_supports_amp_scaling")
    assert not loop.param_groups[0]["fused"]


def test_fp16_with_a_fused_optimizer_takes_steps(make_task):
    session = prepare(make_task(mlp), {"batch_size": 4, "amp": "fp16", "optimizer_impl": "fused"}, device="cpu")
    before = [p.detach().clone() for p in session.model.parameters()]
    for _ in range(12):
        session.step(session.task.batch(4))
    assert all(not torch.equal(p, q) for p, q in zip(before, session.model.parameters(), strict=True))


def test_hooks_of_the_user_stay(make_task):
    seen = []

    def configure(model):
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        return optimizer

    trained(make_task(mlp, configure_optimizers=configure), "foreach")
    assert seen == ["stepped"] * 3


def test_what_the_device_does_by_default_is_left_out(make_task, make_setting):
    assert OptimizerImpl().support(make_setting(make_task(mlp))).choices == ("default", "foreach", "fused")


@pytest.mark.parametrize(
    ("kind", "settings", "current"),
    [
        (torch.optim.AdamW, {}, "foreach"),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}, "for-loop"),
        (torch.optim.Adam, {"lr": torch.tensor(1e-3)}, "for-loop"),
        (torch.optim.Adam, {"lr": torch.tensor(1e-3), "capturable": True}, "foreach"),
        (torch.optim.SGD, {"lr": torch.tensor(1e-3)}, "foreach"),
        (torch.optim.Adafactor, {}, "for-loop"),
        (torch.optim.Adafactor, {"foreach": True}, "foreach"),
    ],
)
def test_what_a_gpu_does_by_default_is_what_torch_takes_for_the_optimizer(kind, settings, current):
    assert current_implementation(kind(mlp().parameters(), **settings), foreach=True) == current


def test_what_the_user_chose_is_left_out(make_task, make_setting):
    task = make_task(mlp, configure_optimizers=lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    assert OptimizerImpl().support(make_setting(task)).choices == ("default", "for-loop", "foreach")


def test_an_implementation_that_does_not_exist_is_left_out_with_the_reason(make_task, make_setting):
    task = make_task(mlp, configure_optimizers=lambda model: torch.optim.RMSprop(model.parameters()))
    support = OptimizerImpl().support(make_setting(task))
    assert support.choices == ("default", "foreach")
    assert "RMSprop has no fused" in support.reason


def test_sparse_gradients_rule_fused_out(make_task, make_setting):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 4, sparse=True)

        def forward(self, x):
            return self.embed(x.argmax(1) % 4)

    task = make_task(Sparse, configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert "fused" not in OptimizerImpl().support(make_setting(task)).choices


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [Own, torch.optim.LBFGS])
def test_other_optimizers_are_left_alone(make_task, make_setting, kind):
    task = make_task(mlp, configure_optimizers=lambda model: kind(model.parameters()))
    support = OptimizerImpl().support(make_setting(task))
    assert support.choices == ("default",)
    assert kind.__name__ in support.reason
    with pytest.raises(UnsupportedError, match=kind.__name__):
        prepare(task, {"optimizer_impl": "fused"}, device="cpu")


def test_an_optimizer_with_state_is_left_alone(make_task):
    def configure(model):
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer

    with pytest.raises(UnsupportedError, match="already has state"):
        prepare(make_task(mlp, configure_optimizers=configure), {"optimizer_impl": "fused"}, device="cpu")
