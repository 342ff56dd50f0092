"""What a search probes before it has a model of the space: what the techniques themselves say usually wins."""

from __future__ import annotations

from autotune.proposers.design import starting_configs
from autotune.records.inspection import Support
from autotune.records.objective import Memory, Throughput
from autotune.space import Space, build_space
from autotune.techniques import find_techniques
from autotune.units import GIB
from tests.closed_form import inspection


def space_of(**support: Support) -> Space:
    return build_space(inspection(support=inspection().support | support), find_techniques())[0]


def described(space: Space, **options: object) -> dict[str, dict[str, object]]:
    wanted = {"baseline_fits": True, "objective": Throughput(memory_limit_bytes=GIB, headroom=0.05), **options}
    return {reason: config.differences(space.baseline) for config, reason in starting_configs(space, **wanted)}  # type: ignore[arg-type]


def test_every_likely_technique_is_tried_alone_and_all_together() -> None:
    found = described(space_of())
    assert found["amp alone"] == {"amp": "bf16"}
    assert found["optimizer_impl alone"] == {"optimizer_impl": "fused"}
    assert found["all together"] == {"amp": "bf16", "optimizer_impl": "fused"}
    assert found["2x the batch"] == {"batch_size": 8, "accumulation_steps": 12, **found["all together"]}


def test_the_next_best_is_taken_where_the_usual_winner_is_not_supported() -> None:
    assert described(space_of(amp=Support(choices=("off", "fp16"))))["amp alone"] == {"amp": "fp16"}


def test_where_nothing_fits_the_least_memory_is_tried() -> None:
    found = described(space_of(), baseline_fits=False)
    assert found["least memory"] == {"batch_size": 1, "accumulation_steps": 96, "checkpoint_segments": 6}
    assert list(found) == ["least memory", "least memory, all switched"]


def test_for_memory_whatever_saves_it_is_tried_too() -> None:
    found = described(space_of(), objective=Memory(memory_limit_bytes=GIB, headroom=0.05))
    assert found["all that saves memory"] == {**found["all together"], "checkpoint_segments": 6}
    assert found["1/2 of the batch"]["batch_size"] == 2
