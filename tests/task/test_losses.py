import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune.errors import TaskError
from autotune.task.losses import default_loss, default_weight


class Returns(nn.Module):
    """A model that returns what it was made with."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *args, **kwargs):
        return self.output


class Output:
    def __init__(self, loss):
        self.loss = loss


def refused(output, batch, *expected):
    with pytest.raises(TaskError) as caught:
        default_loss(Returns(output), batch)
    message = str(caught.value)
    for text in (*expected, "Write the loss into your model file", "def training_step(model, batch):"):
        assert text in message, message
    return message


def test_a_dict_batch_takes_the_loss_attribute_of_the_output():
    loss = torch.tensor(2.0)
    assert default_loss(Returns(Output(loss)), {"x": torch.zeros(2)}) is loss


def test_a_dict_batch_takes_the_item_loss_of_a_dict():
    loss = torch.tensor(2.0)
    assert default_loss(Returns({"loss": loss, "logits": torch.zeros(2)}), {"x": torch.zeros(2)}) is loss


def test_a_dict_batch_is_called_with_its_keys():
    class Net(nn.Module):
        def forward(self, *, x, labels):
            return {"loss": (x - labels).sum()}

    assert default_loss(Net(), {"x": torch.ones(2), "labels": torch.zeros(2)}) == 2


def test_integer_targets_give_cross_entropy():
    logits, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    assert torch.equal(default_loss(Returns(logits), (torch.zeros(5), y)), functional.cross_entropy(logits, y))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_integer_targets_of_any_width_are_taken(dtype):
    logits, y = torch.randn(2, 3), torch.tensor([0, 2])
    assert torch.equal(default_loss(Returns(logits), [None, y.to(dtype)]), functional.cross_entropy(logits, y))


def test_token_targets_take_the_classes_in_the_last_dimension():
    logits, y = torch.randn(2, 7, 3), torch.randint(3, (2, 7))
    expected = functional.cross_entropy(logits.reshape(14, 3), y.reshape(14))
    assert torch.equal(default_loss(Returns(logits), (None, y)), expected)


def test_image_targets_take_the_classes_in_the_second_dimension_as_torch_does():
    logits, y = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    assert torch.equal(default_loss(Returns(logits), (None, y)), functional.cross_entropy(logits, y))


def test_floating_targets_give_mean_squared_error():
    output, y = torch.randn(5, 2), torch.randn(5, 2)
    assert torch.equal(default_loss(Returns(output), (None, y)), functional.mse_loss(output, y))


@pytest.mark.parametrize(("output_shape", "y_shape"), [((5, 1), (5,)), ((5,), (5, 1)), ((5, 1, 2), (5, 2))])
def test_singleton_dimensions_are_matched_and_never_broadcast(output_shape, y_shape):
    output, y = torch.randn(output_shape), torch.randn(y_shape)
    expected = functional.mse_loss(output.flatten(), y.flatten())
    assert torch.equal(default_loss(Returns(output), (None, y)), expected)


def test_floating_targets_of_another_shape_are_refused():
    refused(torch.randn(5, 3), (torch.zeros(5, 2), torch.zeros(5)), "(5, 3)", "(5,)", "equal shapes", "x, y = batch")


def test_one_score_for_an_integer_target_is_refused_with_a_binary_loss_to_write():
    refused(torch.randn(5, 1), (torch.zeros(5, 2), torch.ones(5).long()), "(5, 1)", "binary_cross_entropy_with_logits")


def test_boolean_targets_are_refused_with_a_binary_loss_to_write():
    refused(torch.randn(5), (torch.zeros(5, 2), torch.ones(5).bool()), "(5,)", "binary_cross_entropy_with_logits")


def test_classes_that_could_be_in_either_dimension_are_refused():
    refused(torch.randn(2, 7, 7), (None, torch.randint(7, (2, 7))), "(2, 7, 7)", "either of two dimensions")


def test_an_output_without_a_loss_is_refused():
    refused(Output(None), {"x": torch.zeros(2, 3)}, "dict with 1 keys (x: a float32 tensor of shape (2, 3))", "labels")
    refused(torch.zeros(2), {"x": torch.zeros(2)}, "a float32 tensor of shape (2,)", "which has no loss")


def test_an_output_that_is_no_tensor_is_refused_for_a_pair():
    refused((torch.zeros(2), 3), (torch.zeros(2), torch.zeros(2)), "tuple of 2", "the int 3")


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        (torch.zeros(2, 3), "a float32 tensor of shape (2, 3)"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(2).long()), "a tuple of 3"),
        ((torch.zeros(2), None), "None"),
    ],
)
def test_other_batches_are_refused_with_what_was_seen(batch, seen):
    refused(torch.zeros(2), batch, seen, "a dict for model(**batch) or a pair (x, y)")


def test_the_training_step_that_is_shown_is_valid_python():
    message = refused(torch.zeros(2), (torch.zeros(2), torch.zeros(2), torch.zeros(2).long()))
    compile(message[message.index("def ") :], "shown", "exec")
    assert "x1, x2, y = batch" in message


def test_weights_are_the_targets_that_count():
    y = torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert default_weight((None, y), shifts_labels=False) == 3
    assert default_weight({"labels": y}, shifts_labels=False) == 3
    assert default_weight({"labels": y}, shifts_labels=True) == 1
    assert default_weight((None, torch.zeros(4, 5)), shifts_labels=False) == 20


def test_weights_are_left_to_the_number_of_samples_where_the_loss_is_a_sample_mean():
    assert default_weight({"labels": torch.tensor([1, 2])}, shifts_labels=False) is None
    assert default_weight({"labels": torch.zeros(2, 3)}, shifts_labels=False) is None
    assert default_weight({"x": torch.zeros(2, 3)}, shifts_labels=True) is None
    assert default_weight(torch.zeros(2), shifts_labels=False) is None


@pytest.mark.parametrize(
    ("output", "y"),
    [(torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [0, 2, 1]])), (torch.randn(2, 3), torch.randn(2, 3))],
)
def test_weighted_micro_batches_give_the_loss_of_the_whole_batch(output, y):
    halves = [(output[i : i + 1], (None, y[i : i + 1])) for i in range(2)]
    weights = [default_weight(batch, shifts_labels=False) for _, batch in halves]
    losses = [default_loss(Returns(half), batch) for half, batch in halves]
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(mean, default_loss(Returns(output), (None, y)))
