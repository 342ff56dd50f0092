"""What fits into a memory, asked of a memory model that is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.prediction.memory import MemoryEstimate
from autotune.records.capacity import Breakdown, GroupPrediction
from autotune.records.config import ALONE, Choice, Config, divisors
from autotune.records.device import Communicators
from autotune.techniques import Techniques, find_techniques
from autotune.tuning.predict import Question
from autotune.units import GIB, MIB

techniques = find_techniques()

OUTSIDE = 512 * MIB


@dataclass(frozen=True)
class SmallSpace:
    """Two techniques that shape memory, and one that does not."""

    world = ALONE
    global_batch: int | None = 48
    techniques: Techniques = field(default_factory=find_techniques)
    choices: Mapping[str, tuple[Choice, ...]] = field(
        default_factory=lambda: {
            "batch_size": tuple(divisors(48)),
            "amp": ("off", "bf16"),
            "matmul_precision": ("highest", "tf32"),
            "optimizer_impl": ("default", "fused"),
        }
    )

    @property
    def baseline(self) -> Config:
        return techniques.complete({"batch_size": 4}, global_batch=self.global_batch)

    def complete(self, choices: Mapping[str, Choice]) -> Config:
        return techniques.complete({"batch_size": 4, **choices}, global_batch=self.global_batch)

    def why_untraced(self, name: str, choice: Choice) -> str:
        return ""


class Known:
    """A peak that is `sample_bytes` a sample beside what is outside the allocator; half as much in bf16."""

    def __init__(self, sample_bytes: int, tell: Callable[[Config], bool] = lambda config: True) -> None:
        self._sample_bytes = sample_bytes
        self._tell = tell

    def estimates(self, configs: Sequence[Config]) -> list[MemoryEstimate | None]:
        return [self._estimate(config) for config in configs]

    def _estimate(self, config: Config) -> MemoryEstimate | None:
        if not self._tell(config):
            return None
        activations = config.batch_size * self._sample_bytes // (1 if config["amp"] == "off" else 2)
        breakdown = Breakdown(
            parameters_bytes=MIB,
            gradients_bytes=MIB,
            optimizer_bytes=2 * MIB,
            activations_bytes=activations,
            temporaries_bytes=0,
            modules=(("blocks.0", activations // 2),),
        )
        return MemoryEstimate(peak_bytes=OUTSIDE + 8 * MIB + activations, log_std=0.05, breakdown=breakdown)


def question(known: Known, usable_bytes: int = 10 * GIB, **options: Any) -> Question:
    space = SmallSpace(options.pop("global_batch", 48))
    return Question(
        space,
        known.estimates,
        outside_bytes=OUTSIDE,
        communicators=Communicators(),
        limit_bytes=options.pop("limit_bytes", 2 * usable_bytes),
        usable_bytes=usable_bytes,
        dataset_size=options.pop("dataset_size", None),
    )


def groups(*arguments: Any, **options: Any) -> list[GroupPrediction]:
    return question(*arguments, **options).groups()


def test_the_largest_divisor_of_the_global_batch_that_fits_is_found() -> None:
    plain, bf16 = groups(Known(500 * MIB))  # 9.5 GiB: 18 samples in fp32, 37 in bf16
    assert (plain.peak.config["batch_size"], bf16.peak.config["batch_size"]) == (16, 24)
    assert (plain.peak.config["accumulation_steps"], plain.fits, plain.bounded) == (3, True, False)
    assert plain.peak.peak_bytes <= 10 * GIB


def test_without_a_global_batch_it_is_any_size_up_to_the_dataset() -> None:
    assert groups(Known(500 * MIB), global_batch=None)[0].peak.config["batch_size"] == 19
    bounded = groups(Known(500 * MIB), global_batch=None, dataset_size=12)[0]
    assert (bounded.peak.config["batch_size"], bounded.bounded) == (12, True)


def test_a_batch_that_may_be_beyond_the_card_is_not_said_to_fit() -> None:
    asked = question(Known(500 * MIB), limit_bytes=10 * GIB, global_batch=None)
    largest = asked.groups()[0].peak
    next_larger = asked.peak(asked.space.complete({"batch_size": int(largest.config["batch_size"]) + 1}))
    assert largest.peak_high_bytes <= 10 * GIB and asked.fits(largest)
    assert next_larger is not None and next_larger.peak_bytes < asked.usable_bytes
    assert next_larger.peak_high_bytes > 10 * GIB and not asked.fits(next_larger)


def test_where_nothing_fits_the_smallest_batch_is_shown_not_to() -> None:
    plain, bf16 = groups(Known(15 * GIB))
    assert (plain.fits, plain.peak.config["batch_size"]) == (False, 1)
    assert (bf16.fits, bf16.peak.config["batch_size"]) == (True, 1)


def test_combinations_of_the_same_memory_are_one() -> None:
    plain, bf16 = groups(Known(500 * MIB))
    assert (plain.switched_on, plain.same_memory) == ({}, ({"optimizer_impl": "fused"},))
    assert (bf16.switched_on, bf16.same_memory) == ({"amp": "bf16"}, ({"amp": "bf16", "optimizer_impl": "fused"},))


def test_equal_memory_of_unlike_combinations_is_a_coincidence_and_stays_apart() -> None:
    def tell(config: Config) -> bool:
        return (config["amp"] == "off" and config["optimizer_impl"] == "fused") or config["amp"] == "bf16"

    found = groups(Known(0, tell))
    assert [group.switched_on for group in found] == [{"optimizer_impl": "fused"}, {"amp": "bf16"}]
    assert found[0].same_memory == ({"amp": "bf16", "optimizer_impl": "fused"},)


def test_the_parts_add_up_to_the_peak() -> None:
    peak = groups(Known(500 * MIB))[0].peak
    parts = (
        peak.parameters_bytes,
        peak.gradients_bytes,
        peak.optimizer_bytes,
        peak.activations_bytes,
        peak.temporaries_bytes,
        peak.allocator_bytes,
        peak.outside_bytes,
    )
    assert sum(parts) == peak.peak_bytes
    assert (peak.outside_bytes, peak.allocator_bytes) == (OUTSIDE, 4 * MIB)
    assert peak.modules == (("blocks.0", peak.activations_bytes // 2),)


def test_what_was_not_traced_is_left_out() -> None:
    assert groups(Known(MIB, lambda config: False)) == []
    assert question(Known(MIB, lambda config: False)).peak(SmallSpace().baseline) is None
