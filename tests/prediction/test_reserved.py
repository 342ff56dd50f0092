"""What torch's own allocator reserved for whole steps over the played cards is what was predicted."""

from __future__ import annotations

import pytest

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
