"""What a guest of the play-off runs next."""

from __future__ import annotations

from autotune.records.config import Config
from autotune.records.outcome import Kind, Outcome
from autotune.techniques import find_techniques
from autotune.tuning.guest import NUM_ROUNDS, Guest
from tests.closed_form import MIB, measurement

GLOBAL_BATCH = 16
ERROR = Outcome(kind=Kind.ERROR, cause="ValueError: no such word")
OTHERS = Outcome(kind=Kind.OOM, cause="others hold the memory", crowded=True)


def config(batch_size: int) -> Config:
    return find_techniques().complete({"batch_size": batch_size}, global_batch=GLOBAL_BATCH)


def does_not_fit(outcome: Outcome) -> bool:
    return outcome.kind is Kind.OOM and not outcome.crowded


def invite(fits: int, *, may_be_halved: bool = True, first: Outcome | None = None) -> tuple[Guest, list[int]]:
    """A guest of batch 16, and the batches that it runs; up to `fits` samples have room. Its first process may end otherwise."""
    ran: list[int] = []

    def run(config: Config, number: int) -> Outcome:
        ran.append(config.batch_size)
        if first is not None and len(ran) == 1:
            return first
        if config.batch_size > fits:
            return Outcome(kind=Kind.OOM, cause="an allocation of 1 GiB failed")
        return Outcome(kind=Kind.OK, measurement=measurement(config, 100.0, MIB), wall_s=2.0)

    def smaller(config: Config) -> Config | None:
        return config.halved(GLOBAL_BATCH) if may_be_halved and config.batch_size > 1 else None

    return Guest(config=config(16), run=run, does_not_fit=does_not_fit, smaller=smaller), ran


def visit_all(guest: Guest) -> None:
    for number in range(20):
        if guest.num_missing:
            guest.visit(number)


def test_it_runs_through_in_three_rounds_and_is_told_with_the_time_it_takes() -> None:
    guest, ran = invite(fits=16)
    visit_all(guest)
    assert ran == [16] * NUM_ROUNDS
    assert list(guest.ran) == [0, 1, 2]
    assert guest.wall_s == 2.0


def test_what_does_not_fit_is_halved_and_counts_in_no_round() -> None:
    guest, ran = invite(fits=4)
    visit_all(guest)
    assert ran == [16, 8, *[4] * NUM_ROUNDS]
    assert guest.config == config(4)
    assert list(guest.ran) == [2, 3, 4]


def test_what_does_not_fit_and_may_not_be_halved_is_run_once() -> None:
    guest, ran = invite(fits=4, may_be_halved=False)
    visit_all(guest)
    assert ran == [16]
    assert guest.failed is not None
    assert guest.failed.cause == "an allocation of 1 GiB failed"


def test_an_error_ends_its_visits() -> None:
    guest, ran = invite(fits=16, first=ERROR)
    visit_all(guest)
    assert ran == [16]
    assert guest.failed is ERROR


def test_memory_that_others_hold_says_nothing_of_it() -> None:
    guest, ran = invite(fits=16, first=OTHERS)
    visit_all(guest)
    assert ran == [16] * (NUM_ROUNDS + 1)
    assert guest.failed is None
