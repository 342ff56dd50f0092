"""What torch's own allocator reserved for whole steps over the played cards is what was predicted, to within a few MiB."""

from __future__ import annotations

import pytest

from autotune.units import MIB
from tests.benchmarks.reserved import predicted, recorded


@pytest.mark.parametrize("model", ["gpt", "BERT"])
def test_a_model_is_predicted_to_reserve_what_the_allocator_did(model: str) -> None:
    rows = [row for row in recorded() if row.model == model and "optimizer_impl" not in row.config]
    found = predicted(model, rows)
    errors = sorted(abs(expected / row.reserved_bytes - 1) for row, (expected, _) in zip(rows, found, strict=True))
    assert errors[len(errors) // 2] <= 0.01
    misses = [
        (row, explained)
        for row, (_, explained) in zip(rows, found, strict=True)
        if abs(explained - row.reserved_bytes) > 4 * MIB
    ]
    assert len(misses) <= 1, misses
