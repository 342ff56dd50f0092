"""What a search is told of communicators by those before it on this machine, and what it leaves for the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome
from autotune.runners.runner import Runner
from autotune.study.caches import CommunicatorCache


def know_communicators(runner: Runner, inspection: Inspection, folder: Path) -> Inspection:
    """The inspection of a world, with what was measured of communicators on this machine before.

    Args:
        folder: of the study; what is measured of this machine is kept there.
    """
    if not (cache := _communicator_cache(runner, inspection, folder)):
        return inspection
    return replace(inspection, communicators=cache.known(inspection.communicators))


def keep_communicators(runner: Runner, inspection: Inspection, folder: Path, outcome: Outcome) -> None:
    """Keep what a probe saw of communicators, for the next search on this machine. Arguments as of `know_communicators`."""
    if (seen := outcome.communicators_seen) and (cache := _communicator_cache(runner, inspection, folder)):
        cache.keep(*seen)


def _communicator_cache(runner: Runner, inspection: Inspection, folder: Path) -> CommunicatorCache | None:
    """None where the runner's jobs are not of this machine, or communicators take nothing of a device's memory."""
    if not (runner.keeps_traces and inspection.communicators.guess_bytes):
        return None
    return CommunicatorCache(folder, inspection.device, inspection.known_world.size)
