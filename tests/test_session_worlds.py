"""A session in a world of two processes trains what one process trains on the same global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from autotune.errors import TaskError
from autotune.records.config import ALONE, World
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import split
from autotune.techniques import UnsupportedError
from tests.worlds import Ranks

GLOBAL_BATCH = 16
WORDS, WIDTH = 64, 16
SPREADS = ("ddp", "zero1", "fsdp", "fsdp_grad")


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(WIDTH), nn.ReLU(), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, unused: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if unused:
            self.spare = nn.Linear(3, 3)
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Method(Model):
    """Its loss is a method, and its forward is not called."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(Model.forward(self, x).flatten(0, 1), y.flatten())


def samples(batch_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of which each sample ignores another number, so that the mean over all is not the mean of means."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(WORDS, (batch_size, 12), generator=draw) for _ in range(2))
    y[torch.rand(batch_size, 12, generator=draw) < torch.rand(batch_size, 1, generator=draw)] = -100
    return x, y


def task(**model: bool) -> Task:
    def build_model() -> nn.Module:
        torch.manual_seed(3)
        return Model(**model)

    return Task(build_model=build_model, make_batch=samples, global_batch=GLOBAL_BATCH)


def of_method() -> Task:
    def build_model() -> nn.Module:
        torch.manual_seed(3)
        return Method()

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        return model.loss(*batch)

    def loss_weight(batch: Any) -> int:
        return int((batch[1] >= 0).sum())

    return Task(
        build_model=build_model,
        make_batch=samples,
        training_step=training_step,
        loss_weight=loss_weight,
        global_batch=GLOBAL_BATCH,
    )


def with_groups() -> Task:
    def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        others = [p for name, p in model.named_parameters() if "norm" not in name]
        return torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)

    return replace(task(), configure_optimizers=configure_optimizers)


def with_sgd() -> Task:
    return replace(task(), configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def with_hooks() -> Task:
    """A hook that changes the gradients before a step, and one that changes the parameters after it."""

    def shorten(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1)

    def shrink(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)

    def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.register_step_pre_hook(shorten)
        optimizer.register_step_post_hook(shrink)
        return optimizer

    return replace(task(), configure_optimizers=configure_optimizers)


TASKS = {
    "plain": task,
    "tied weights": lambda: task(tied=True),
    "unused parameters": lambda: task(unused=True),
    "frozen parameters": lambda: task(frozen=True),
    "clipping": lambda: replace(task(), max_grad_norm=0.1),
    "a loss that is a method": of_method,
    "groups": with_groups,
    "sgd": with_sgd,
    "hooks of the optimizer": with_hooks,
}


def steps(session: Session, batches: list[Any]) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the parameters afterwards, whole."""
    losses = [float(session.step(batch)) for batch in batches]
    return losses, {name: whole(parameter) for name, parameter in session.model.named_parameters()}


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone().numpy()


def trained(world: World, name: str, config: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
    session = prepare(TASKS[name](), config, device="cpu", world=world, on_oom="raise")
    batches = [samples(GLOBAL_BATCH, seed) for seed in range(3)]
    return steps(session, [tuple(part[world.rank :: world.size] for part in batch) for batch in batches])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


def same(found: list[Any], expected: tuple[list[float], dict[str, Any]], tolerance: float) -> None:
    for losses, parameters in found:
        assert losses == pytest.approx(expected[0], abs=tolerance)
        for name, value in expected[1].items():
            assert abs(parameters[name] - value).max() < tolerance, name


@pytest.mark.parametrize("parallel", SPREADS)
@pytest.mark.parametrize("name", TASKS)
def test_three_steps_of_two_processes_are_those_of_one(ranks: Ranks, name: str, parallel: str) -> None:
    alone = trained(ALONE, name, {"batch_size": GLOBAL_BATCH})
    same(ranks.run(trained, name, {"batch_size": 4, "parallel": parallel}), alone, 1e-5)


EXACT = (
    {"checkpoint_segments": 4},
    {"checkpoint_segments": 2},
    {"checkpoint_segments": 4, "checkpoint_policy": "selective"},
    {"optimizer_impl": "fused"},
    {"optimizer_impl": "foreach"},
    {"inplace_activations": True},
    {"loss_chunks": True},
    {"freeze": "blocks:2"},
)


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.parametrize("others", EXACT, ids=str)
def test_other_techniques_go_on_working(ranks: Ranks, others: dict[str, Any], parallel: str) -> None:
    alone = trained(ALONE, "plain", {"batch_size": GLOBAL_BATCH, **others})
    same(ranks.run(trained, "plain", {"batch_size": 8, "parallel": parallel, **others}), alone, 1e-5)


@pytest.mark.parametrize("parallel", SPREADS)
@pytest.mark.parametrize("others", [{"amp": "bf16"}, {"amp": "fp16"}], ids=str)
def test_reduced_precision_trains_alike_in_every_process(ranks: Ranks, others: dict[str, Any], parallel: str) -> None:
    first, second = ranks.run(trained, "plain", {"batch_size": 8, "parallel": parallel, **others})
    same([second], first, 1e-7)
    same([first], trained(ALONE, "plain", {"batch_size": GLOBAL_BATCH, **others}), 0.05)


REFUSED = {
    "param_dtype": ({"param_dtype": "bf16"}, "take the gradients before they are put together"),
    "optimizer_in_backward": ({"optimizer_in_backward": True, "batch_size": 8}, "put together over the processes"),
    "a static graph that accumulates": ({"ddp_static_graph": True, "batch_size": 4}, "a step of one micro batch"),
    "zero1 with another state": (
        {"optimizer_state": "8bit", "parallel": "zero1"},
        "leave optimizer_state at its default",
    ),
    "groups of three": ({"parallel": "hsdp:3"}, "2 processes make no groups of 3"),
}


def refusal(world: World, config: Mapping[str, Any]) -> str:
    try:
        prepare(task(), config, device="cpu", world=world)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_says_why(ranks: Ranks, name: str) -> None:
    config, reason = REFUSED[name]
    assert all(reason in said for said in ranks.run(refusal, config))


def test_a_world_of_one_refuses_to_shard() -> None:
    assert "needs several processes" in refusal(ALONE, {"parallel": "fsdp"})


def draws(world: World) -> tuple[float, float]:
    torch.manual_seed(5)
    session = prepare(
        replace(task(), make_batch=lambda n: samples(n, int(torch.randint(999, ())))), {}, device="cpu", world=world
    )
    return float(torch.rand(())), float(next(iter(session.loader))[0][0].float().mean())


def test_batches_that_are_made_differ_by_process_as_random_masks_do(ranks: Ranks) -> None:
    (first, batch), (second, other) = ranks.run(draws)
    assert first != second
    assert batch != other


def starts(world: World) -> float:
    torch.manual_seed(world.rank)
    different = replace(task(), build_model=Model)
    session = prepare(different, {}, device="cpu", world=world)
    return float(sum(p.double().sum() for p in session.model.parameters()))


def test_parameters_start_equal(ranks: Ranks) -> None:
    first, second = ranks.run(starts)
    assert first == second


def without_terms(world: World, parallel: str) -> dict[str, Any]:
    """A step in which the second process has no target that counts."""
    session = prepare(task(), {"batch_size": 8, "parallel": parallel}, device="cpu", world=world)
    x, y = samples(16)
    y[8:] = -100
    own = slice(0, 8) if world.rank == 0 else slice(8, 16)
    return steps(session, [(x[own], y[own])])


@pytest.mark.parametrize("parallel", SPREADS)
def test_a_process_without_a_target_that_counts_adds_nothing(ranks: Ranks, parallel: str) -> None:
    x, y = samples(16)
    y[8:] = -100
    alone = steps(prepare(task(), {"batch_size": 16}, device="cpu", world=ALONE), [(x, y)])
    same(ranks.run(without_terms, parallel), alone, 1e-5)


def masked() -> Task:
    """Its mean is 0 / 0 where no target counts, and its gradient NaN."""

    def training_step(model: nn.Module, batch: Any) -> torch.Tensor:
        counts = batch[1].flatten() >= 0
        losses = nn.functional.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].clamp(0).flatten(), reduction="none"
        )
        return (losses * counts).sum() / counts.sum()

    return replace(task(), training_step=training_step, loss_weight=lambda batch: int((batch[1] >= 0).sum()))


def masked_steps(world: World, config: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """In the second process a quarter of the first step's targets counts, and none of the second's."""
    session = prepare(masked(), config, device="cpu", world=world)
    batches = [samples(16, seed) for seed in range(3)]
    for (_, y), start in zip(batches, (12, 8), strict=False):
        y[start:] = -100
    own = slice(16 * world.rank // world.size, 16 * (world.rank + 1) // world.size)
    return steps(session, [(x[own], y[own]) for x, y in batches])


@pytest.mark.parametrize("parallel", SPREADS)
def test_a_micro_batch_whose_own_mean_would_be_over_nothing_adds_nothing(ranks: Ranks, parallel: str) -> None:
    alone = masked_steps(ALONE, {"batch_size": 16})
    same(ranks.run(masked_steps, {"batch_size": 4, "parallel": parallel}), alone, 1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"ddp_bucket_view": True},
        {"ddp_bucket_view": True, "parallel": "zero1"},
        {"ddp_static_graph": True, "batch_size": 8},
        {"bucket_mb": 1},
        {"parallel": "fsdp", "shard_offload": True},
    ],
    ids=str,
)
def test_options_of_copies_and_of_shards_train_the_same(ranks: Ranks, config: dict[str, Any]) -> None:
    alone = trained(ALONE, "plain", {"batch_size": GLOBAL_BATCH})
    same(ranks.run(trained, "plain", {"batch_size": 4, **config}), alone, 1e-5)


def test_shards_that_travel_in_bf16_train_alike_in_every_process(ranks: Ranks) -> None:
    first, second = ranks.run(trained, "plain", {"batch_size": 8, "parallel": "fsdp", "shard_dtype": "bf16"})
    same([second], first, 1e-7)
    same([first], trained(ALONE, "plain", {"batch_size": GLOBAL_BATCH}), 0.05)


def test_an_option_of_shards_is_none_of_copies(ranks: Ranks) -> None:
    assert "an option of sharded parameters" in ranks.run(refusal, {"shard_dtype": "bf16"})[0]
    assert "an option of copies of the model" in ranks.run(refusal, {"parallel": "fsdp", "bucket_mb": 5})[0]


def evaluated(world: World, config: Mapping[str, Any]) -> dict[str, float]:
    """Of nine lines, which two processes share unevenly."""
    session = prepare(task(), config, device="cpu", world=world)
    x, y = samples(9)
    return session.evaluate(torch.utils.data.TensorDataset(x, y), batch_size=2)


@pytest.mark.parametrize("parallel", SPREADS)
def test_what_is_evaluated_is_the_mean_over_all_samples_of_all_processes(ranks: Ranks, parallel: str) -> None:
    alone = evaluated(ALONE, {"batch_size": 16})
    for found in ranks.run(evaluated, {"batch_size": 4, "parallel": parallel}):
        assert found == pytest.approx(alone)


def saved(world: World, config: Mapping[str, Any], folder: str) -> None:
    session = prepare(task(), config, device="cpu", world=world)
    x, y = samples(16)
    session.step((x[world.rank :: world.size], y[world.rank :: world.size]))
    checkpoint.save(session.state_dict(), checkpoint_id=folder, no_dist=world.size == 1)


def resumed(world: World, config: Mapping[str, Any], folder: str) -> tuple[list[float], dict[str, Any]]:
    session = prepare(task(), config, device="cpu", world=world)
    state = session.state_dict()
    checkpoint.load(state, checkpoint_id=folder, no_dist=world.size == 1)
    session.load_state_dict(state)
    x, y = samples(16, seed=1)
    return steps(session, [(x[world.rank :: world.size], y[world.rank :: world.size])])


@pytest.mark.parametrize("parallel", SPREADS)
def test_what_a_world_saves_another_goes_on_with(ranks: Ranks, parallel: str, tmp_path: Path) -> None:
    config = {"batch_size": 8, "parallel": parallel}
    uninterrupted = prepare(task(), {"batch_size": 16}, device="cpu", world=ALONE)
    uninterrupted.step(samples(16))
    expected = steps(uninterrupted, [samples(16, seed=1)])
    ranks.run(saved, config, str(tmp_path / "two"))
    same([resumed(ALONE, {"batch_size": 16}, str(tmp_path / "two"))], expected, 1e-5)
    same(ranks.run(resumed, config, str(tmp_path / "two")), expected, 1e-5)
    saved(ALONE, {"batch_size": 16}, str(tmp_path / "one"))
    same(ranks.run(resumed, config, str(tmp_path / "one")), expected, 1e-5)


def unseeded(world: World) -> bool:
    torch.random.default_generator.manual_seed(67280421310721)  # of a script that sets none
    return prepare(replace(task(), build_model=Model), {}, device="cpu", world=world).world == world


def test_torchs_own_seed_which_numpy_does_not_take_is_fine(ranks: Ranks) -> None:
    assert ranks.run(unseeded) == [True, True]


def nothing_counts(world: World, parallel: str) -> bool:
    session = prepare(task(), {"batch_size": 4, "parallel": parallel}, device="cpu", world=world)
    x, y = samples(8)
    session.step((x, torch.full_like(y, -100)))
    return all(bool(torch.isfinite(torch.as_tensor(whole(p))).all()) for p in session.model.parameters())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_step_in_which_nothing_counts_leaves_parameters_finite_as_in_one_process(ranks: Ranks, parallel: str) -> None:
    assert ranks.run(nothing_counts, parallel) == [True, True]


def with_statistics(world: World) -> dict[str, float]:
    """Evaluates after a step, with batch normalisation, where the second process has no sample."""

    def build_model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(n)
        return torch.randn(n, 4, generator=draw), torch.randint(2, (n,), generator=draw)

    session = prepare(
        Task(build_model=build_model, make_batch=make_batch), {"batch_size": 4}, device="cpu", world=world
    )
    session.step(make_batch(4))
    return session.evaluate(torch.utils.data.TensorDataset(*make_batch(1)), batch_size=1)


def test_a_process_without_a_sample_to_evaluate_does_not_hold_the_others_up(ranks: Ranks) -> None:
    first, second = ranks.run(with_statistics)
    assert first == second


def other_numbers(world: World) -> str:
    session = prepare(task(), {"batch_size": 2, "parallel": "fsdp"}, device="cpu", world=world)
    x, y = samples(4 if world.rank else 2)
    try:
        session.step((x, y))
    except TaskError as error:
        return str(error)
    return ""


def test_processes_that_cut_their_parts_into_other_numbers_of_micro_batches_are_told(ranks: Ranks) -> None:
    assert all("all processes have to take as many" in said for said in ranks.run(other_numbers))


def resumed_rate(world: World, parallel: str) -> list[float]:
    """The learning rate that a scheduler has set, after it was kept and loaded into another session."""
    kept, fresh = (
        prepare(task(), {"batch_size": 8, "parallel": parallel}, device="cpu", world=world) for _ in range(2)
    )
    for group in kept.optimizer.param_groups:
        group["lr"] = 0.125
    fresh.load_state_dict(kept.state_dict())
    x, y = samples(8)
    fresh.step((x, y))
    return [group["lr"] for group in fresh.optimizer.param_groups]


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
def test_a_learning_rate_that_was_set_is_kept(ranks: Ranks, parallel: str) -> None:
    assert ranks.run(resumed_rate, parallel) == [[0.125], [0.125]]


def hugging_face() -> Task:
    def build_model() -> nn.Module:
        torch.manual_seed(3)
        config = GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        return GPT2LMHeadModel(config)

    def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
        x, y = samples(batch_size)
        return {"input_ids": x, "labels": y}

    return Task(build_model=build_model, make_batch=make_batch, global_batch=GLOBAL_BATCH)


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(3)))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch), batch.flip(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Clipping(Lit):
    """It clips the gradients in a hook, which is given the optimizer that `self.optimizers()` finds."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert optimizer is self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


def of_lightning(kind: type[Lit] = Lit) -> Task:
    def build_model() -> nn.Module:
        torch.manual_seed(3)
        return kind()

    def make_batch(batch_size: int) -> torch.Tensor:
        return torch.randn(batch_size, WIDTH, generator=torch.Generator().manual_seed(batch_size))

    return Task(build_model=build_model, make_batch=make_batch, global_batch=GLOBAL_BATCH)


STACKS = {
    "a Hugging Face model": hugging_face,
    "a LightningModule": of_lightning,
    "a LightningModule that clips": lambda: of_lightning(Clipping),
}


def trained_by_stack(world: World, name: str, config: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
    made = STACKS[name]()
    session = prepare(made, config, device="cpu", world=world, on_oom="raise")
    each = GLOBAL_BATCH // world.size
    (own, *_) = [split(made.batch(GLOBAL_BATCH), made.cuts(), each)[world.rank]]
    return steps(session, [own] * 3)


@pytest.mark.parametrize("parallel", SPREADS)
@pytest.mark.parametrize("name", STACKS)
def test_models_of_other_stacks_train_the_same_in_two_processes(ranks: Ranks, name: str, parallel: str) -> None:
    alone = trained_by_stack(ALONE, name, {"batch_size": GLOBAL_BATCH})
    same(ranks.run(trained_by_stack, name, {"batch_size": 4, "parallel": parallel}), alone, 1e-5)


def normalised(world: World, parallel: str) -> tuple[list[float], dict[str, Any]]:
    def build_model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    made = Task(build_model=build_model, make_batch=lambda n: (torch.randn(n, WIDTH), torch.zeros(n, dtype=torch.long)))
    session = prepare(made, {"batch_size": 8, "parallel": parallel}, device="cpu", world=world)
    return steps(session, [(x, torch.arange(8) % 2)] * 3)


@pytest.mark.parametrize("parallel", SPREADS)
def test_with_batch_normalisation_all_processes_have_the_same_parameters(ranks: Ranks, parallel: str) -> None:
    first, second = ranks.run(normalised, parallel)
    same([second], first, 1e-6)


def called_hooks(world: World) -> list[str]:
    called, handles = [], []

    def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
        optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
        handles.append(optimizer.register_step_post_hook(lambda *_: called.append("stepped")))
        return optimizer

    made = replace(task(), configure_optimizers=configure_optimizers)
    session = prepare(made, {"batch_size": 8, "parallel": "zero1"}, device="cpu", world=world)
    session.step(samples(8))
    for handle in handles:
        handle.remove()
    session.step(samples(8))
    session.load_state_dict(session.state_dict())
    return called


def test_hooks_of_a_sharded_optimizer_can_be_removed_and_are_called_when_it_is_saved_and_loaded(ranks: Ranks) -> None:
    assert ranks.run(called_hooks) == [["stepped", "saved", "loaded"]] * 2
