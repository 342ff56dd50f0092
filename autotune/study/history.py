"""Which of a study's probes count: failures that may pass are tried again when a search is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from autotune.records.config import Config
from autotune.records.outcome import Kind, Outcome

PATIENT = 0.9  # share of a time-out after which a probe is taken to have had all of it
FLEETING = (Kind.CRASHED, Kind.ERROR)  # may have been the machine's fault: a full disk, another program


class _Probe(Protocol):
    @property
    def stage(self) -> str: ...

    @property
    def feasible(self) -> bool: ...


P = TypeVar("P", bound=_Probe)


def what_stands(outcomes: Sequence[Outcome], timeout_s: float, *, baseline: bool) -> Outcome | None:
    """What a resumed search takes for the outcome of a config; None when it may probe the config again.

    What was measured or ran out of memory stays so, since the limit is the same. A crash or an error gets a second try,
    and after that is the config's own. A probe that was killed sooner than it would be now gets the patience of now. A
    baseline that failed for another reason than memory is always tried again: without it there is no gain to state.

    Args:
        outcomes: of the config outside the play-off, in order; at least one.
        timeout_s: of a probe of the config now.
    """
    certain = [outcome for outcome in outcomes if outcome.kind in (Kind.OK, Kind.OOM)]
    if certain:
        return certain[-1]
    last = outcomes[-1]
    if last.kind is Kind.TIMEOUT:
        again = last.wall_s < PATIENT * timeout_s
    else:
        again = last.kind in FLEETING and sum(outcome.kind in FLEETING for outcome in outcomes) == 1
    return None if again or baseline else last


def feasible_each_time(probes: Iterable[tuple[Config, P]]) -> dict[Config, Sequence[P]]:
    """Per config that was feasible whenever it counts, those of its probes that do, in order.

    They are its last outside the play-off and what the play-off found since: those before failed, else it would not have
    been probed again.
    """
    probes_of: dict[Config, list[P]] = {}
    for config, probe in probes:
        probes_of.setdefault(config, []).append(probe)
    counted = {config: _since_last_search(found) for config, found in probes_of.items()}
    return {config: found for config, found in counted.items() if all(probe.feasible for probe in found)}


def _since_last_search(probes: Sequence[P]) -> Sequence[P]:
    searched = [place for place, probe in enumerate(probes) if probe.stage != "play-off"]
    return probes[searched[-1] :] if searched else probes
