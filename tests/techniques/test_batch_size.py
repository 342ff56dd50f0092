import itertools

import pytest
import torch

from autotune.techniques.batch_size import BatchSize, fine_sizes


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


class Samples(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.zeros(8), 0


def test_a_global_batch_gives_its_exact_divisors(make_task, make_setting):
    support = BatchSize().support(make_setting(make_task(linear, global_batch=96)))
    assert support.choices == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)


def test_divisors_larger_than_the_dataset_are_left_out_with_the_reason(make_task, make_setting):
    task = make_task(linear, global_batch=96, train_dataset=lambda: Samples(50))
    support = BatchSize().support(make_setting(task))
    assert support.choices[-1] == 48
    assert "50 samples" in support.reason


def test_without_a_global_batch_steps_are_fine_and_reach_far_around_the_baseline(make_task, make_setting):
    choices = BatchSize().support(make_setting(make_task(linear), baseline={"batch_size": 32})).choices
    assert choices[0] == 2 and choices[-1] == 2048
    assert all(b / a <= 4 / 3 for a, b in itertools.pairwise(choices) if a >= 3)


def test_the_baseline_is_always_a_choice(make_task, make_setting):
    assert 37 in BatchSize().support(make_setting(make_task(linear), baseline={"batch_size": 37})).choices


def test_sizes_from_32_on_are_multiples_of_8():
    sizes = fine_sizes(5000)
    assert sizes[:15] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48]
    assert all(size % 8 == 0 for size in sizes if size >= 24)


@pytest.mark.parametrize("choice", [0, -1, True, 2.0, "8", None])
def test_what_is_not_a_positive_integer_is_refused(choice):
    with pytest.raises(ValueError, match="at least 1"):
        BatchSize().validate(choice)
