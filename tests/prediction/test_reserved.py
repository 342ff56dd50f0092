"""What torch's own allocator reserved for whole steps over the played cards is what was predicted."""

from __future__ import annotations

import pytest

from tests.benchmarks import reserved_worlds
from tests.benchmarks.reserved import TASKS, predicted, recorded


@pytest.mark.parametrize(
    ("model", "every"),
    [
        *(pytest.param(model, 1, marks=pytest.mark.slow, id=f"{model}, every row") for model in TASKS),
        *(
            pytest.param(model, 10, id=f"{model}, every tenth row")
            for model in ("gpt", "encoder", "U-Net", "recommender")
        ),
    ],
)
def test_a_model_is_predicted_to_reserve_what_the_allocator_did(model: str, every: int) -> None:
    rows = [row for row in recorded() if row.model == model][::every]
    found = predicted(model, rows)
    reserved = [each.reserved_bytes / row.reserved_bytes - 1 for row, each in zip(rows, found, strict=True)]
    sizes = sorted(map(abs, reserved))
    assert sizes[len(sizes) // 2] <= 0.005
    assert sizes[-1] <= 0.03
    assert all(
        abs(each.requested_bytes / row.requested_bytes - 1) <= 0.01 for row, each in zip(rows, found, strict=True)
    )


@pytest.mark.parametrize(
    ("model", "world_size", "every"),
    [
        *(
            pytest.param(model, size, 1, marks=pytest.mark.slow, id=f"{model} by {size}, every row")
            for model, size in sorted({(row.model, row.world_size) for row in reserved_worlds.recorded()})
        ),
        pytest.param("gpt", 4, 4, id="gpt by 4, every fourth row"),
    ],
)
def test_rank_0_of_a_world_is_predicted_to_reserve_what_the_allocator_did(
    model: str, world_size: int, every: int
) -> None:
    rows = [row for row in reserved_worlds.recorded() if (row.model, row.world_size) == (model, world_size)][::every]
    found = reserved_worlds.predicted(model, rows)
    errors = sorted(reserved / row.reserved_bytes - 1 for row, reserved in zip(rows, found, strict=True))
    assert errors[0] >= -0.05
    assert sorted(map(abs, errors))[len(errors) // 2] <= 0.01
    assert errors[-1] <= 0.05
