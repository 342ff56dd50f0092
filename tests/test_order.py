"""The order in which a session draws its samples: as torch does, and again in the order of a seed."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from autotune import order
from autotune.order import Order


def test_a_pass_is_the_one_that_torch_would_draw() -> None:
    torch.manual_seed(3)
    of_torch = [batch.tolist() for batch in DataLoader(range(10), batch_size=4, shuffle=True)]
    torch.manual_seed(3)
    assert [batch.tolist() for batch in DataLoader(range(10), batch_size=4, sampler=Order(range(10)))] == of_torch


def test_what_follows_is_all_samples_in_the_seeds_order_whatever_was_drawn_before() -> None:
    found = []
    for already in (0, 3, 9):
        drawing = Order(range(10))
        draws = iter(drawing)
        list(islice(draws, already))
        drawing.begin_again(5)
        found.append(list(draws))
    assert found[0] == found[1] == found[2] and sorted(found[0]) == list(range(10))
    drawing.begin_again(6)
    assert list(drawing) != found[0]
    assert list(drawing) != list(drawing)  # the passes after it are random


def test_of_a_large_training_set_no_whole_order_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LARGE", 20)
    monkeypatch.setattr(order, "_PIECE", 300)
    drawing, same = Order(range(1000)), Order(range(1000))
    drawing.begin_again(5)
    same.begin_again(5)
    drawn = list(drawing)
    assert drawn == list(same) and len(drawn) == 1000 and 550 < len(set(drawn)) < 700  # 1 - 1/e of them, on average
