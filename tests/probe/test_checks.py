import os

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune.coupling.draws import dropout_off
from autotune.probe.checks import EXACT_ERROR, run_checks
from autotune.task import Task
from autotune.techniques import checkpoint_segments, find_techniques
from tests.devices.processes import in_process
from tests.gpu.test_cuda import require

TECHNIQUES = find_techniques()

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm, dropout=0.2):
        super().__init__()
        self.up, self.norm, self.dropout, self.down = (
            nn.Linear(16, 32),
            norm(32),
            nn.Dropout(dropout),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return x + self.down(self.dropout(functional.gelu(self.norm(self.up(x)))))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def task_of(build_model=Model, **changes):
    def make_batch(batch_size):
        return torch.randn(batch_size, 16), torch.randint(0, 4, (batch_size,))

    return Task(**{"build_model": build_model, "make_batch": make_batch, "global_batch": 64, **changes})


def with_batch_norm():
    return Model(norm=nn.BatchNorm1d)


@pytest.mark.parametrize("build_model", [Model, with_batch_norm])
@pytest.mark.parametrize(("name", "choice"), [("checkpoint_segments", 3), ("optimizer_impl", "fused")])
def test_exact_techniques_are_found_exact_with_dropout_live(build_model, name, choice):
    check = run_checks(task_of(build_model), {name: choice}, "cpu", batch_size=8)
    assert check.passed, check.reason
    assert check.exact and check.names_equal
    assert check.gradient_error <= EXACT_ERROR
    assert check.buffer_error <= EXACT_ERROR
    assert (check.technique, check.choice) == ("config", f"{name}={choice}")


@pytest.mark.arithmetic
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_reduced_precision_is_judged_by_the_cosine_of_its_unscaled_gradients(amp):
    check = run_checks(task_of(), {"amp": amp}, "cpu", batch_size=8)
    assert check.passed, check.reason
    assert not check.exact
    assert 0.999 <= check.gradient_cosine < 1
    assert EXACT_ERROR < check.gradient_error < 0.1
    assert (check.technique, check.choice) == ("config", f"amp={amp}")


class Graph(nn.Module):
    """A graph convolution, whose adjacency is a buffer."""

    def __init__(self, adjacency):
        super().__init__()
        self.up, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        return self.head((self.adjacency @ self.up(x).T).T)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(16).to_sparse(),
        lambda: torch.eye(16).to_sparse_csr(),
        lambda: torch.ones(1, 16).expand(16, 16),
    ],
    ids=["coo", "csr", "expanded"],
)
def test_models_with_sparse_and_expanded_buffers_are_compared(make):
    check = run_checks(task_of(lambda: Graph(make())), {"optimizer_impl": "fused"}, "cpu", batch_size=8)
    assert check.passed, check.reason
    assert check.buffer_error == 0


class Shrinking(Graph):
    """Changes the values of its sparse buffer in each forward pass."""

    def forward(self, x):
        self.adjacency._values().mul_(0.5)
        return super().forward(x)


def test_a_change_of_a_sparse_buffer_is_compared():
    """Two micro batches shrink it twice."""
    task = task_of(lambda: Shrinking(torch.eye(16).to_sparse()))
    check = run_checks(task, {"accumulation_steps": 4}, "cpu", batch_size=8)
    assert check.buffer_error == pytest.approx(0.5)


def deep_with_batch_norm(num_layers=10):
    layers = []
    for channels in [3, *[32] * (num_layers - 1)]:
        layers += [nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images(batch_size):
    return torch.randn(batch_size, 3, 16, 16), torch.randint(0, 10, (batch_size,))


@pytest.mark.arithmetic
def test_reduced_precision_may_differ_as_far_as_its_rounding_of_parameters_makes_plain_training_differ():
    check = run_checks(task_of(deep_with_batch_norm, make_batch=images), {"amp": "bf16"}, "cpu", batch_size=4)
    assert check.gradient_cosine < 0.999 and check.gradient_error > 0.1
    assert check.passed, check.reason
    assert "plain fp32 itself has" in check.reason


@pytest.mark.arithmetic
@pytest.mark.parametrize("factor", [0.25, 2.0])
def test_a_gradient_of_another_size_is_caught_where_the_model_magnifies_rounding(monkeypatch, factor):
    def scaled(technique, build, choice):
        for parameter in build.model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", scaled)
    task = task_of(deep_with_batch_norm, make_batch=images)
    check = run_checks(task, {"amp": "bf16", "channels_last": True}, "cpu", batch_size=4)
    assert not check.passed
    assert "the gradient differs" in check.reason


def very_deep_with_batch_norm():
    return deep_with_batch_norm(24)


def changed_by(monkeypatch, hook):
    """The check of bf16 in a model that magnifies rounding as far as it can be, with its gradients changed by `hook`."""

    def apply(technique, build, choice):
        for parameter in build.model.parameters():
            parameter.register_hook(hook)

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", apply)
    task = task_of(very_deep_with_batch_norm, make_batch=images)
    return run_checks(task, {"amp": "bf16", "channels_last": True}, "cpu", batch_size=4)


def of_the_same_size(gradient):
    drawn = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)).to(gradient)
    return drawn * gradient.norm() / drawn.norm()


@pytest.mark.arithmetic
@pytest.mark.parametrize("hook", [lambda gradient: gradient, of_the_same_size], ids=["right", "of no direction"])
def test_where_the_model_magnifies_rounding_too_far_to_tell_the_check_is_undecided(monkeypatch, hook):
    check = changed_by(monkeypatch, hook)
    assert check.passed is None and "tells little in this model" in check.reason


@pytest.mark.arithmetic
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5])
def test_the_gradients_size_is_checked_however_far_the_model_magnifies_rounding(monkeypatch, factor):
    check = changed_by(monkeypatch, lambda gradient: gradient * factor)
    assert check.passed is False and "the gradient's size differs" in check.reason


@pytest.mark.arithmetic
def test_a_gradient_that_points_the_other_way_never_passes(monkeypatch):
    assert changed_by(monkeypatch, torch.neg).passed is False


def test_accumulation_is_compared_with_the_whole_batch():
    check = run_checks(task_of(), {"batch_size": 16, "accumulation_steps": 4}, "cpu", batch_size=8)
    assert check.passed, check.reason
    assert 0 < check.gradient_error <= EXACT_ERROR


def test_accumulation_with_batch_norm_is_another_problem_and_says_so():
    check = run_checks(task_of(with_batch_norm), {"accumulation_steps": 4}, "cpu", batch_size=4)
    assert not check.passed
    assert check.gradient_cosine < 0.999
    assert "expected: batch normalisation" in check.reason


@pytest.mark.arithmetic
def test_a_whole_config_is_compared_at_once():
    config = {
        "batch_size": 8,
        "accumulation_steps": 8,
        "amp": "bf16",
        "checkpoint_segments": 2,
        "optimizer_impl": "foreach",
    }
    check = run_checks(task_of(), config, "cpu", batch_size=8)
    assert check.passed, check.reason
    assert check.choice == "accumulation_steps=8, amp=bf16, checkpoint_segments=2, optimizer_impl=foreach"


def info_nce(model, batch):
    z = functional.normalize(model(batch[0]).flatten(1), dim=-1)
    return functional.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def test_a_failed_check_names_the_cause_micro_batches_precision_or_a_technique(monkeypatch):
    """A contrastive loss in bf16 passes whole, and no precision makes it right in micro batches."""
    coupled = task_of(lambda: Model(dropout=0.0), training_step=info_nce)
    assert run_checks(coupled, {"amp": "bf16"}, "cpu", batch_size=8).passed
    cut = run_checks(coupled, {"amp": "bf16", "accumulation_steps": 2}, "cpu", batch_size=8)
    assert cut.passed is False and cut.cause == ("accumulation_steps",)
    assert cut.reason.startswith(
        "the cause is cutting the batch into micro batches, which changes the gradient of plain fp32 as well"
    )
    assert run_checks(coupled, {"accumulation_steps": 2}, "cpu", batch_size=8).cause == ("accumulation_steps",)
    halve_the_gradients(monkeypatch, TECHNIQUES["checkpoint_segments"])
    wrong = {"amp": "bf16", "checkpoint_segments": 2}
    assert run_checks(task_of(lambda: Model(dropout=0.0)), wrong, "cpu", batch_size=4).cause == ("checkpoint_segments",)
    both = run_checks(coupled, {**wrong, "accumulation_steps": 2}, "cpu", batch_size=8)
    assert both.cause == ("accumulation_steps", "checkpoint_segments")


def test_precision_is_named_where_it_is_the_cause(monkeypatch):
    halve_the_gradients(monkeypatch, TECHNIQUES["amp"])
    check = run_checks(
        task_of(lambda: Model(dropout=0.0)), {"amp": "bf16", "checkpoint_segments": 2}, "cpu", batch_size=4
    )
    assert check.passed is False and check.cause == ("amp",)
    assert check.reason.startswith("the cause is amp=bf16, whose precision is reduced")


def halve_the_gradients(monkeypatch, technique):
    apply = type(technique).apply

    def halves(self, build, choice):
        apply(self, build, choice)
        for parameter in build.model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)

    monkeypatch.setattr(type(technique), "apply", halves)


def test_an_inexact_technique_that_claims_to_be_exact_is_caught(monkeypatch):
    def wrong(technique, build, choice):
        build.model.blocks[1].up.register_full_backward_hook(lambda module, into, out: (into[0] * 1.01,))

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", wrong)
    check = run_checks(task_of(lambda: Model(dropout=0.0)), {"channels_last": True}, "cpu", batch_size=8)
    assert not check.passed
    assert "the gradient differs" in check.reason


def test_activations_in_place_that_are_used_again_are_caught(monkeypatch):
    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(16, 16), nn.LeakyReLU(0.1), nn.Linear(16, 4)

        def forward(self, x):
            return self.down(self.up(self.act(x)) + x)

    def in_place(technique, build, choice):
        build.model.act.inplace = True

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", in_place)
    check = run_checks(task_of(Rectified), {"channels_last": True}, "cpu", batch_size=8)
    assert not check.passed
    assert "the loss differs" in check.reason


def test_batch_norm_updated_twice_is_caught_by_the_buffers_alone(monkeypatch):
    monkeypatch.setattr(checkpoint_segments, "remember_buffers", lambda *args: torch.enable_grad())
    check = run_checks(task_of(with_batch_norm), {"checkpoint_segments": 4}, "cpu", batch_size=8)
    assert not check.passed
    assert check.gradient_error <= EXACT_ERROR
    assert check.reason.startswith("buffers differ")


def test_renamed_parameters_are_caught(monkeypatch):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    def wrap(technique, build, choice):
        build.model.blocks[0] = Wrapper(build.model.blocks[0])

    monkeypatch.setattr(type(TECHNIQUES["checkpoint_segments"]), "apply", wrap)
    check = run_checks(task_of(), {"checkpoint_segments": 1}, "cpu", batch_size=8)
    assert not check.passed and not check.names_equal
    assert check.gradient_error <= EXACT_ERROR
    assert "names" in check.reason


def test_an_optimizer_that_loses_its_weight_decay_is_caught_after_three_steps(monkeypatch):
    def forget(technique, build, choice):
        for group in build.optimizer.param_groups:
            group["weight_decay"] = 0.0

    def configure(model):
        return torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    monkeypatch.setattr(type(TECHNIQUES["optimizer_impl"]), "apply", forget)
    check = run_checks(task_of(configure_optimizers=configure), {"optimizer_impl": "foreach"}, "cpu", batch_size=8)
    assert not check.passed
    assert check.gradient_error <= EXACT_ERROR
    assert "the parameters' movement differs" in check.reason


def test_lost_dropout_masks_are_caught(monkeypatch):
    def apply(technique, build, choice):
        from functools import partial

        from torch.utils.checkpoint import checkpoint

        for block in build.model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    monkeypatch.setattr(type(TECHNIQUES["checkpoint_segments"]), "apply", apply)
    assert not run_checks(task_of(), {"checkpoint_segments": 4}, "cpu", batch_size=8).passed


def test_a_model_that_differs_between_equal_runs_raises_the_noise_floor():
    class Restless(Model):
        def forward(self, x):
            return super().forward(x) * (1 + 1e-3 * os.urandom(1)[0] / 255)

    check = run_checks(task_of(Restless), {"checkpoint_segments": 4}, "cpu", batch_size=8)
    assert check.noise > EXACT_ERROR
    assert check.passed, check.reason


def test_a_model_that_magnifies_rounding_is_not_blamed_on_an_exact_technique(monkeypatch):
    class Steep(Model):
        def forward(self, x):
            return torch.sin(super().forward(x) * 3e4)

    def round_otherwise(technique, build, choice):
        build.model.register_forward_pre_hook(lambda module, args: (args[0] * (1 + torch.finfo(torch.float32).eps),))

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", round_otherwise)
    check = run_checks(task_of(lambda: Steep(dropout=0.0)), {"channels_last": True}, "cpu", batch_size=8)
    assert min(check.noise, check.gradient_error) > EXACT_ERROR
    assert check.passed, check.reason


def test_a_models_noise_is_not_looked_for_where_a_config_trains_as_plain_fp32_does():
    check = run_checks(task_of(), {"checkpoint_segments": 4}, "cpu", batch_size=8)
    assert check.passed and check.noise == 0.0


class Kinked(nn.Module):
    """`sign` jumps where its argument is zero but for the order in which four numbers are added."""

    def __init__(self):
        super().__init__()
        self.head, self.reverse = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), False

    def forward(self, x):
        numbers = [0.1, 0.2, 0.3, -0.6]
        total = torch.zeros(())
        for number in reversed(numbers) if self.reverse else numbers:
            total = total + torch.tensor(number, dtype=x.dtype)
        return self.head(x) * (1 + 0.1 * torch.sign(total.where(total.abs() > 1e-12, 0)))


@pytest.mark.parametrize(
    "others",
    [{}, pytest.param({"inplace_activations": True}, id="beside a technique that tries batches of its own")],
)
def test_a_gradient_that_turns_on_one_rounding_is_judged_in_double_precision(monkeypatch, others):
    def reverse(technique, build, choice):
        build.model.reverse = True

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", reverse)
    check = run_checks(task_of(Kinked), {"channels_last": True, **others}, "cpu", batch_size=8)
    assert check.gradient_error > EXACT_ERROR
    assert check.passed, check.reason
    assert "in double precision" in check.reason


def test_stochastic_depth_is_compared_at_its_mean():
    class Deep(Model):
        def forward(self, x):
            for block in self.blocks:
                keep = x.new_empty(x.shape[0], 1).bernoulli_(0.8).div_(0.8)
                x = x + (block(x) - x) * keep
            return self.head(x)

    check = run_checks(task_of(Deep), {"accumulation_steps": 2}, "cpu", batch_size=8)
    assert check.passed, check.reason
    assert check.noise <= EXACT_ERROR


class Denoiser(nn.Module):
    """Finds the noise that is added to its images, in the layout and the dtype that they have there."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), draw

    def forward(self, x):
        features = self.first(x)
        noise = self.draw(features)
        return (self.second(features + noise) - noise).pow(2).mean()


def noisy_task(draw):
    return Task(
        build_model=lambda: Denoiser(draw),
        make_batch=lambda n: torch.randn(n, 3, 8, 8),
        training_step=lambda model, batch: model(batch),
    )


DRAWS = [torch.randn_like, torch.rand_like, lambda x: torch.empty_like(x).normal_(0.0, 2.0)]


@pytest.mark.parametrize("draw", DRAWS, ids=["randn_like", "rand_like", "normal_"])
def test_noise_is_the_same_in_another_layout(draw, monkeypatch):
    check = run_checks(noisy_task(draw), {"channels_last": True}, "cpu", batch_size=4)
    assert check.passed, check.reason
    assert max(check.noise, check.gradient_error) < 10 * EXACT_ERROR

    def wrong(technique, build, choice):
        build.model.to(memory_format=torch.channels_last)
        build.model.second.weight.register_hook(lambda gradient: gradient * 1.01)

    monkeypatch.setattr(type(TECHNIQUES["channels_last"]), "apply", wrong)
    assert not run_checks(noisy_task(draw), {"channels_last": True}, "cpu", batch_size=4).passed


def test_noise_that_is_drawn_in_other_ways_is_the_models_own():
    check = run_checks(
        noisy_task(lambda x: torch.empty_like(x).exponential_()), {"channels_last": True}, "cpu", batch_size=4
    )
    assert check.passed and check.noise > 0.01 and check.gradient_error > 0.01
    assert "says little" in check.reason


@pytest.mark.arithmetic
def test_noise_is_the_same_in_a_short_type():
    check = run_checks(noisy_task(torch.randn_like), {"amp": "bf16"}, "cpu", batch_size=4)
    assert check.passed and check.noise <= EXACT_ERROR and check.gradient_cosine > 0.999


def test_models_that_change_their_input_are_compared_on_the_same_input():
    class InPlace(Model):
        def forward(self, x):
            return super().forward(x.mul_(0.5))

    check = run_checks(task_of(InPlace), {"checkpoint_segments": 2}, "cpu", batch_size=8)
    assert check.passed and check.noise <= EXACT_ERROR


def test_random_states_are_put_back():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run_checks(task_of(), {"checkpoint_segments": 1}, "cpu", batch_size=4)
    assert torch.equal(torch.rand(3), expected)


def test_convolutions_are_compared_without_the_rounding_to_tf32_that_they_are_trained_with():
    seen = set()

    class Watching(Model):
        def forward(self, x):
            seen.add(torch.backends.cudnn.allow_tf32)
            return super().forward(x)

    assert torch.backends.cudnn.allow_tf32
    run_checks(task_of(Watching), {"checkpoint_segments": 2}, "cpu", batch_size=4)
    assert seen == {False}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        {"amp": "bf16", "checkpoint_segments": 2},
        {"amp": "fp16", "optimizer_impl": "fused"},
        {"matmul_precision": "tf32"},
        {"checkpoint_segments": 4},
        {"optimizer_impl": "fused"},
        {"accumulation_steps": 2},
    ],
    ids=str,
)
def test_configs_pass_on_a_gpu(config):
    if config.get("amp") == "bf16":
        require((8, 0), "bf16")
    check = in_process(lambda: run_checks(task_of(), config, "cuda", batch_size=8))
    assert check.passed, check.reason


RANDOM_LAYERS = {
    "dropout": (nn.Dropout(0.5), (4, 8)),
    "dropout in place": (nn.Dropout(0.5, inplace=True), (4, 8)),
    "dropout of channels": (nn.Dropout2d(0.5), (4, 2, 3, 3)),
    "alpha dropout": (nn.AlphaDropout(0.5), (4, 8)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True), (4, 3, 8)),
    "recurrent": (nn.LSTM(8, 8, 2, dropout=0.5), (4, 3, 8)),
}


@pytest.mark.parametrize(("layer", "shape"), RANDOM_LAYERS.values(), ids=RANDOM_LAYERS)
def test_dropout_can_be_made_the_identity(layer, shape):
    def run(seed):
        torch.manual_seed(seed)
        output = layer(torch.ones(shape).requires_grad_() * 1)
        return output[0] if isinstance(output, tuple) else output

    assert not torch.equal(run(0), run(1))
    with dropout_off(layer):
        torch.testing.assert_close(run(0), run(1), rtol=0, atol=0)
    assert not torch.equal(run(0), run(1))


def test_dropout_as_a_function_can_be_made_the_identity():
    x = torch.randn(2, 4, 8)
    with dropout_off(nn.Identity()):
        assert torch.equal(functional.dropout(x, 0.5), x)
        assert torch.equal(functional.dropout(x, 0.5, True), x)
        assert torch.equal(torch.dropout(x, 0.5, True), x)
        assert torch.equal(torch.bernoulli(torch.full((3,), 0.25)), torch.full((3,), 0.25))
        attended = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        again = functional.scaled_dot_product_attention(x, x, x, None, 0.9)
    torch.testing.assert_close(attended, functional.scaled_dot_product_attention(x, x, x))
    torch.testing.assert_close(again, attended)
