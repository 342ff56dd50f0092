"""What searches in one folder share: traces, calibrations, figures of communicators and rechecks, in files beside the studies.

A file that is broken or of another format is replaced. Where the folder cannot be written, the next search traces and measures
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from autotune.devices import capabilities_of
from autotune.devices.calibration import arithmetic, communicators_hold_for
from autotune.devices.cpu import processor_model
from autotune.files import drop_oldest, write_whole
from autotune.prediction.traces import Traces
from autotune.records.config import ALONE, Choice, World
from autotune.records.device import Calibration, Communicators, DeviceInfo
from autotune.records.inspection import TaskFacts
from autotune.records.recheck import Recheck, Rechecks
from autotune.version import __version__

T = TypeVar("T", Calibration, Communicators, Rechecks, Traces)

CALIBRATIONS, RECHECKS, TRACES = ".calibration", ".rechecks", ".traces"  # folders beside the studies' databases
KEPT_RECHECKS = 100  # the newest: a machine changes
KEPT_FILES, KEPT_BYTES = 100, 64 * 2**20  # traces of all tasks: the oldest go


class _Cache(Generic[T]):
    """A record kept in a file of its own.

    Attributes:
        kind: the record's class.
    """

    kind: type[T]

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> T | None:
        """The kept record; None where there is none that can be read."""
        try:
            return self.kind.from_dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def write(self, record: T) -> None:
        """Keep a record."""
        with contextlib.suppress(OSError):
            write_whole(self.path, json.dumps(record.to_dict()))


class CalibrationCache(_Cache[Calibration]):
    """The kept calibration for the device and circumstances `of` (`autotune.devices.calibration.holds_for`).

    Args:
        folder: the folder of the studies.
    """

    kind = Calibration

    def __init__(self, folder: Path, of: Mapping[str, str]) -> None:
        super().__init__(folder / CALIBRATIONS / f"{_key(dict(of))}.json")


class RecheckCache(_Cache[Rechecks]):
    """The rechecks of answers on the device and in the circumstances `of`, as for `CalibrationCache`.

    Args:
        folder: the folder of the studies.
    """

    kind = Rechecks

    def __init__(self, folder: Path, of: Mapping[str, str]) -> None:
        super().__init__(folder / RECHECKS / f"{_key(dict(of))}.json")

    def add(self, recheck: Recheck) -> None:
        """Keep one more."""
        known = self.read() or Rechecks()
        self.write(Rechecks(rechecks=(*known.rechecks, recheck)[-KEPT_RECHECKS:]))


class CommunicatorCache(_Cache[Communicators]):
    """What was measured of the communicators of so many processes, on cards like this one, here and now.

    Args:
        folder: the folder of the studies.
        info: one of the cards.
        num_processes: that train together.
    """

    kind = Communicators

    def __init__(self, folder: Path, info: DeviceInfo, num_processes: int) -> None:
        self.of = communicators_hold_for(info, num_processes)
        super().__init__(folder / CALIBRATIONS / f"communicators-{_key(self.of)}.json")

    def known(self, communicators: Communicators) -> Communicators:
        """The same, with what is kept of them. A file that is of other circumstances is as good as none."""
        kept = self.read()
        if kept is None or kept.of != self.of:
            return communicators
        return replace(communicators, measured=kept.measured, of=kept.of)

    def keep(self, number: int, num_bytes: int) -> Communicators:
        """Keep that so many hold `num_bytes`, unless that is no news. Returns all that is known."""
        before = self.known(Communicators(of=self.of))
        if (found := before.seen(number, num_bytes)) != before:
            self.write(found)
        return found


class TraceCache(_Cache[Traces]):
    """The kept traces of one task on one kind of device.

    Args:
        folder: the folder of the studies.
        facts: the task's facts, from its inspection.
        target: the kind of device that the traces predict for.
        batch_sizes: the batch sizes of the configs that are traced.
        trained: what is trained of the task.
        world: the processes that train it together.
    """

    kind = Traces

    def __init__(
        self,
        folder: Path,
        facts: TaskFacts,
        target: str,
        batch_sizes: Collection[int],
        trained: Mapping[str, Choice],
        world: World = ALONE,
    ) -> None:
        versions = [__version__, metadata.version("torch")]
        # what can be traced depends on the processor's arithmetic, and several machines may share the folder
        on_host = not capabilities_of(target).own_processors
        processor = [processor_model(), *arithmetic().values()] if on_host else []
        task = [facts.source_hash, facts.num_parameters]
        key = _key([*task, dict(trained), target, world.size, sorted({*batch_sizes}), *versions, *processor])
        super().__init__(folder / TRACES / f"{facts.name}-{key}.json")

    def write(self, record: Traces) -> None:
        """Keep traces, but not failures."""
        super().write(replace(record, failures={}))
        with contextlib.suppress(OSError):
            files = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            drop_oldest(files, KEPT_FILES, KEPT_BYTES)


def _key(known: Any) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def agrees(plain: Traces, kept: Traces) -> bool:
    """Whether plain training, traced again as `plain`, still is what `kept` holds.

    Sizes and the optimizer may come from the environment or from files, which the task's hash does not cover.
    """
    models_agree = all(
        group in kept.models and kept.models[group].holds(model) for group, model in plain.models.items()
    )
    return models_agree and plain.updates.items() <= kept.updates.items()
