import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune import prepare
from autotune.techniques import UnsupportedError
from autotune.techniques.block_chains import numbers_up_to
from autotune.techniques.checkpoint_segments import CheckpointSegments


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm, dropout=0.0):
        super().__init__()
        self.up, self.norm, self.dropout, self.down = nn.Linear(8, 16), norm(16), nn.Dropout(dropout), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.dropout(functional.gelu(self.norm(self.up(x)))))


class Listed(nn.Module):
    """Blocks in a ModuleList, deep inside the model."""

    def __init__(self, make_block=Block, depth=6):
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.layers = nn.ModuleList(make_block() for _ in range(depth))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.trunk.layers:
            x = layer(x)
        return self.head(x)


class Chained(nn.Module):
    def __init__(self, make_block=Block, depth=6):
        super().__init__()
        self.trunk = nn.Sequential(*(make_block() for _ in range(depth)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.trunk(x))


class Iterated(Chained):
    def forward(self, x):
        for block in self.trunk:
            x = block(x)
        return self.head(x)


MODELS = [Listed, Chained, Iterated]


def step(task, segments, *, seed=1, **config):
    """One session's gradients and buffers after accumulating the gradient of a fixed batch."""
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 6, "checkpoint_segments": segments, **config}, device="cpu")
    torch.manual_seed(0)
    batch = task.batch(6)
    torch.manual_seed(seed)
    session.accumulate(batch)
    return session, [p.grad for p in session.model.parameters()]


def assert_same(task, segments, **config):
    plain, plain_gradients = step(task, 0, **config)
    session, gradients = step(task, segments, **config)
    assert list(session.model.state_dict()) == list(plain.model.state_dict())
    assert [n for n, _ in session.model.named_parameters()] == [n for n, _ in plain.model.named_parameters()]
    for expected, gradient in zip(plain_gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    for (name, expected), (_, buffer) in zip(plain.model.named_buffers(), session.model.named_buffers(), strict=True):
        assert torch.equal(expected, buffer), name
    return session


def with_gradient_penalty(model, batch):
    """A loss that takes derivatives itself, so that blocks are recomputed before the backward pass and in it."""
    x = batch[0].requires_grad_(True)
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
    return functional.cross_entropy(scores, batch[1]) + slope.square().mean()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_loss_that_takes_derivatives_itself_is_the_same(make_task, make_setting, model, norm):
    task = make_task(lambda: model(lambda: Block(norm)), training_step=with_gradient_penalty)
    assert len(CheckpointSegments().support(make_setting(task)).choices) > 1
    assert_same(task, 3)


def saved_bytes(session, batch):
    """Bytes that the forward pass keeps for the backward pass, parameters left out."""
    parameters = {p.data_ptr() for p in session.model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = session.loss(batch)
    del loss
    return sum(kept.values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("segments", [1, 2, 4, 6])
def test_gradients_are_those_of_plain_training(make_task, model, segments):
    assert_same(make_task(model), segments)


@pytest.mark.parametrize("model", MODELS)
def test_dropout_draws_the_same_masks_when_recomputing(make_task, model):
    assert_same(make_task(lambda: model(lambda: Block(dropout=0.5))), 3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics_are_updated_once(make_task, model, momentum):
    def norm(width):
        return nn.BatchNorm1d(width, momentum=momentum)

    session = assert_same(make_task(lambda: model(lambda: Block(norm=norm))), 3)
    assert session.model.trunk.get_submodule("layers.0" if model is Listed else "0").norm.num_batches_tracked == 1


def test_instance_norm_statistics_are_updated_once():
    def block():
        return nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.InstanceNorm1d(2, affine=True, track_running_stats=True))

    from autotune.task import Task

    task = Task(
        build_model=lambda: nn.Sequential(*(block() for _ in range(3)), nn.Flatten(), nn.Linear(16, 4)),
        make_batch=lambda n: (torch.randn(n, 2, 8), torch.randint(0, 4, (n,))),
    )
    assert_same(task, 2)


def test_spectral_norm_recomputes_with_the_vectors_of_the_first_pass(make_task):
    def block():
        block = Block()
        block.up = nn.utils.parametrizations.spectral_norm(block.up)
        return block

    assert_same(make_task(lambda: Listed(block)), 6)


def test_buffers_that_no_forward_pass_changes_are_copied_once_only(make_task):
    class Masked(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(1, 8))

        def forward(self, x):
            return super().forward(x) * self.mask

    session, _ = step(make_task(lambda: Listed(Masked)), 6)
    block = session.model.trunk.layers[0]
    assert (block, "mask") in block.forward.constant


def test_a_block_called_several_times_is_right(make_task):
    class Shared(Listed):
        def forward(self, x):
            for layer in (*self.trunk.layers, *self.trunk.layers):
                x = layer(x)
            return self.head(x)

    assert_same(make_task(lambda: Shared(lambda: Block(nn.BatchNorm1d, 0.2), depth=2)), 2)


def test_tied_weights_stay_tied(make_task):
    def build():
        model = Listed()
        for layer in model.trunk.layers[1:]:
            layer.up.weight = model.trunk.layers[0].up.weight
        return model

    session = assert_same(make_task(build), 4)
    assert session.model.trunk.layers[3].up.weight is session.model.trunk.layers[0].up.weight


def test_frozen_parameters_and_inputs_stay_frozen(make_task):
    def build():
        model = Chained()
        model.trunk[0].requires_grad_(False)
        model.trunk[1].requires_grad_(False)
        return model

    session = assert_same(make_task(build), 3)
    assert session.model.trunk[0].up.weight.grad is None
    assert session.model.trunk[2].up.weight.grad is not None


def test_keyword_arguments_none_and_tuples_pass_through(make_task):
    class Fussy(Block):
        def forward(self, x, memory=None, *, scale):
            x = super().forward(x) * scale["by"]
            return x, None if memory is None else memory + x

    class Model(Listed):
        def __init__(self):
            super().__init__(Fussy)

        def forward(self, x):
            memory = None
            for layer in self.trunk.layers:
                x, memory = layer(x, memory=memory, scale={"by": 0.5})
                memory = x if memory is None else memory
            return self.head(x + memory)

    assert_same(make_task(Model), 3)


def test_autocast_holds_in_the_recomputation(make_task):
    assert_same(make_task(Listed), 3, amp="bf16")
    assert_same(make_task(Chained), 2, amp="bf16")


@pytest.mark.parametrize("model", MODELS)
def test_less_is_kept_for_the_backward_pass(make_task, model):
    task = make_task(lambda: model(depth=12))
    batch = task.batch(64)
    kept = {
        n: saved_bytes(prepare(task, {"batch_size": 64, "checkpoint_segments": n}, device="cpu"), batch)
        for n in (0, 3, 12)
    }
    assert kept[3] < 0.8 * kept[0]
    assert kept[12] < 0.4 * kept[0]


def test_a_list_has_its_blocks_checkpointed_evenly(make_task):
    session = prepare(make_task(lambda: Listed(depth=8)), {"checkpoint_segments": 4}, device="cpu")
    assert ["forward" in vars(layer) for layer in session.model.trunk.layers] == [True, False] * 4


def test_evaluation_calls_straight_through(make_task, monkeypatch):
    session = prepare(make_task(Chained), {"checkpoint_segments": 2}, device="cpu")

    def refuse(*args, **kwargs):
        raise AssertionError("checkpoint was called")

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", refuse)
    session.model.eval()
    session.model(torch.randn(2, 8))
    session.model.train()
    with torch.no_grad():
        session.model(torch.randn(2, 8))


def test_hooks_on_the_blocks_still_run(make_task):
    session = prepare(make_task(Chained), {"checkpoint_segments": 2}, device="cpu")
    seen = []
    for block in session.model.trunk:
        block.register_forward_hook(lambda module, args, output: seen.append(module))
    session.loss(session.task.batch(2))
    assert seen == list(session.model.trunk)


def test_a_deep_copy_computes_with_its_own_parameters(make_task):
    session = prepare(make_task(Chained), {"checkpoint_segments": 2}, device="cpu")
    average = copy.deepcopy(session.model)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.zero_()
    average(torch.randn(2, 8)).sum().backward()
    assert average.trunk[0].up.weight.grad.abs().sum() > 0
    assert session.model.trunk[0].up.weight.grad is None


def test_the_task_can_name_the_blocks(make_task):
    task = make_task(Listed, checkpoint_blocks=lambda model: [model.trunk.layers[1], model.trunk.layers[4]])
    session = assert_same(task, 2)
    assert [i for i, layer in enumerate(session.model.trunk.layers) if "forward" in vars(layer)] == [1, 4]


def test_named_blocks_must_belong_to_the_model(make_task, make_setting):
    support = CheckpointSegments().support(make_setting(make_task(Listed, checkpoint_blocks=lambda model: [Block()])))
    assert support.choices == (0,)
    assert "modules of that model" in support.reason


def test_a_hugging_face_cache_is_switched_off(make_setting):
    from transformers import GPT2Config, GPT2LMHeadModel

    from autotune.task import Task

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2, use_cache=True)

    def make_batch(batch_size):
        ids = torch.randint(0, 20, (batch_size, 8))
        return {"input_ids": ids, "labels": ids}

    task = Task(build_model=lambda: GPT2LMHeadModel(copy.deepcopy(config)), make_batch=make_batch)
    assert CheckpointSegments().support(make_setting(task)).choices == (0, 1, 2, 3)
    assert_same(task, 3)


def test_every_number_of_blocks_is_a_choice_until_there_are_many(make_task, make_setting):
    assert CheckpointSegments().support(make_setting(make_task(lambda: Listed(depth=4)))).choices == (0, 1, 2, 3, 4)
    assert numbers_up_to(13) == [1, 2, 3, 4, 6, 8, 12, 13]


def test_a_model_without_a_chain_says_so(make_task, make_setting):
    support = CheckpointSegments().support(make_setting(make_task(lambda: nn.Linear(8, 4))))
    assert support.choices == (0,)
    assert "checkpoint_blocks" in support.reason


def test_blocks_that_are_never_called_as_modules_are_not_searched(make_task, make_setting):
    class Bypassing(Listed):
        def forward(self, x):
            for layer in self.trunk.layers:
                x = layer.down(layer.up(x))
            return self.head(x)

    support = CheckpointSegments().support(make_setting(make_task(Bypassing)))
    assert support.choices == (0,)
    assert "does not call" in support.reason


def test_more_segments_than_blocks_are_refused(make_task):
    with pytest.raises(UnsupportedError, match="the model has 6 blocks"):
        prepare(make_task(Listed), {"checkpoint_segments": 7}, device="cpu")
