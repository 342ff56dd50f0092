import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.task import Task
from autotune.techniques.channels_last import ChannelsLast


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8 * 36, 4)

    def forward(self, images):
        return self.head(self.flatten(self.convolution(images)))

    def flatten(self, features):
        return features.flatten(1)


class Viewing(Convolutional):
    def flatten(self, features):
        return features.view(features.shape[0], -1)


def task_of(build_model):
    return Task(build_model=build_model, make_batch=lambda n: (torch.randn(n, 3, 8, 8), torch.randint(0, 4, (n,))))


def test_convolutions_on_images_have_it(make_setting):
    assert ChannelsLast().support(make_setting(task_of(Convolutional))).choices == (False, True)


def test_a_model_without_convolutions_has_it_not(make_task, make_setting):
    support = ChannelsLast().support(make_setting(make_task(lambda: nn.Linear(8, 4))))
    assert support.choices == (False,)
    assert "no 2-D convolution" in support.reason


def test_convolutions_on_what_the_model_makes_of_its_batch_have_it(make_setting):
    task = Task(
        build_model=lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 4)
        ),
        make_batch=lambda n: (torch.randn(n, 36), torch.randint(0, 4, (n,))),
    )
    assert ChannelsLast().support(make_setting(task)).choices == (False, True)


def test_code_that_views_in_the_old_layout_is_found_before_any_probe(make_setting):
    setting = make_setting(task_of(Viewing))
    support = ChannelsLast().support(setting)
    assert support.choices == (False,)
    assert ".reshape()" in support.reason
    assert setting.model.convolution.weight.is_contiguous()


def test_trying_it_leaves_buffers_as_they_are(make_setting):
    class Shifted(Convolutional):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.randn(1, 3, 8, 8))

        def forward(self, images):
            return super().forward(images + self.shift)

    setting = make_setting(task_of(Shifted))
    before, stride = setting.model.shift, setting.model.shift.stride()
    assert ChannelsLast().support(setting).choices == (False, True)
    assert setting.model.shift is before and before.stride() == stride


def test_a_gradient_penalty_is_tried_with_gradients_and_leaves_the_batch_alone(make_setting):
    def training_step(model, batch):
        images = batch[0].requires_grad_(True)
        scores = model(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return nn.functional.cross_entropy(scores, batch[1]) + slope.square().mean()

    task = Task(build_model=Convolutional, make_batch=task_of(Convolutional).make_batch, training_step=training_step)
    setting = make_setting(task)
    assert ChannelsLast().support(setting).choices == (False, True)
    assert not setting.batch[0].requires_grad
    assert setting.model.convolution.weight.is_contiguous()


def test_parameters_and_batches_are_converted():
    seen = []

    def training_step(model, batch):
        seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = Task(build_model=Convolutional, make_batch=task_of(Convolutional).make_batch, training_step=training_step)
    session = prepare(task, {"batch_size": 2, "channels_last": True}, device="cpu")
    session.step(next(iter(session.loader)))
    assert seen == [True]
    assert session.model.convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_gradients_are_the_same():
    batch = task_of(Convolutional).batch(4)
    gradients = []
    for on in (False, True):
        torch.manual_seed(0)
        session = prepare(task_of(Convolutional), {"batch_size": 4, "channels_last": on}, device="cpu")
        session.accumulate(batch)
        gradients.append([p.grad for p in session.model.parameters()])
    for plain, last in zip(*gradients, strict=True):
        torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-6)


def test_only_booleans_are_choices():
    with pytest.raises(ValueError, match="bool"):
        ChannelsLast().validate(1)
