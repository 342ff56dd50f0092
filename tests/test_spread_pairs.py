"""Every technique of the space beside copies, a sharded optimizer and shards: it trains as one process does, or says why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from autotune.errors import AutotuneError
from autotune.records.config import ALONE, World
from autotune.techniques import SPREAD, find_techniques
from autotune.techniques.base import UnsupportedError
from tests.techniques.test_frameworks import CHOICES
from tests.test_session_worlds import GLOBAL_BATCH, same, trained
from tests.worlds import Ranks

TECHNIQUES = find_techniques()
APART = (SPREAD, "compile", "variant")  # what is paired, what takes a minute, and what the task has none of
NEEDED = {  # what makes a choice more than nothing
    "checkpoint_policy": {"checkpoint_segments": 4},
    "persistent_workers": {"num_workers": 1},
    "prefetch_factor": {"num_workers": 1},
}
REDUCED = ("amp", "matmul_precision", "optimizer_state", "shard_dtype")
TOLERANCE, TOLERANCE_REDUCED = 1e-5, 0.05


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


def attempt(world: World, config: Mapping[str, Any]) -> Any:
    """The losses and parameters of three steps, or why they are not taken."""
    try:
        return trained(world, "plain", config)
    except (AutotuneError, UnsupportedError) as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TECHNIQUES if name not in APART])
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
def test_a_technique_trains_the_same_or_says_why_not(ranks: Ranks, parallel: str, name: str) -> None:
    plain = attempt(ALONE, {"batch_size": GLOBAL_BATCH})
    for choice in CHOICES[name]:
        if choice == TECHNIQUES[name].off:
            continue
        config = {name: choice, **NEEDED.get(name, {})}
        for batch_size in (GLOBAL_BATCH // 2, GLOBAL_BATCH // 4):
            found = ranks.run(attempt, {"batch_size": batch_size, "parallel": parallel, **config})
            reasons = [said for said in found if isinstance(said, str)]
            if reasons:
                assert len(reasons) == len(found) and all(reasons)
                continue
            same(found[1:], found[0], 1e-7)
            alone = attempt(ALONE, {"batch_size": GLOBAL_BATCH, **config})
            expected = plain if isinstance(alone, str) else alone  # one process has no shards to speak of
            same(found[:1], expected, TOLERANCE_REDUCED if name in REDUCED else TOLERANCE)
