"""Where a search is kept, what it must agree on with an earlier one there, and what it takes over of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autotune.devices.calibration import arithmetic
from autotune.errors import ConfigError, StudyError
from autotune.records.config import Choice
from autotune.records.inspection import Inspection
from autotune.records.options import SearchOptions
from autotune.records.study import Fingerprint, SearchFacts, StudyFacts
from autotune.runners.runner import Runner
from autotune.space import Space
from autotune.study.comparable import require_comparable
from autotune.study.place import Place, lock_study, place_of
from autotune.study.store import storage_errors, stored_facts
from autotune.task.source import TaskSource
from autotune.techniques import Techniques
from autotune.units import format_bytes
from autotune.version import __version__


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Where a search is kept, and what an earlier one has left there.

    Attributes:
        place: of the study.
        stored: what is in it already; None for a new study.
        own: where the user's own training is searched: `place`, unless this search trains something else.
        earlier: `stored`, else what is kept of the user's own training.
    """

    place: Place
    stored: StudyFacts | None
    own: Place
    earlier: StudyFacts | None

    def agree(self, options: SearchOptions, free_bytes: int, *, environment: bool) -> Fingerprint:
        """What must be equal for measurements to be comparable, as far as it is known before the model is imported.

        Its memory limit is the one that the user asked for, else that of the study that is resumed, else what is free.

        Args:
            environment: whether what the environment says of the processor's arithmetic holds for the runner.

        Raises:
            StudyError: so much is not free now, or the study has other values.
        """
        limit_bytes = options.memory_limit_bytes
        earlier_bytes = self.earlier.fingerprint.memory_limit_bytes if self.earlier else None
        if limit_bytes is None and earlier_bytes is not None and earlier_bytes > 1.1 * free_bytes:
            study = (self.place if self.stored else self.own).study
            raise StudyError(
                f"the study {study} has a memory limit of {format_bytes(earlier_bytes)}, but only {format_bytes(free_bytes)} are free "
                "now; free memory, or give a --memory-limit that is free, which begins a study beside it"
            )
        agreed = Fingerprint(
            memory_limit_bytes=limit_bytes or earlier_bytes or free_bytes,
            headroom=options.headroom,
            objective=options.objective,
            train_steps=options.train_steps,
            train_epochs=options.train_epochs,
            environment={name: value for name, value in arithmetic().items() if value} if environment else {},
        )
        require_comparable(self.place, self.stored, agreed)
        return agreed

    def options_to_repeat(self, options: SearchOptions, source: TaskSource | None) -> dict[str, str | int]:
        """The options that must be given again to run the answer, without defaults."""
        asked = options.asked()
        if source is not None and source.overrides.get("global_batch") is not None:
            asked["global_batch"] = source.overrides["global_batch"]
        earlier = self.earlier.asked.get("memory_limit") if self.earlier else None
        return asked if earlier is None else {"memory_limit": earlier, **asked}  # a study keeps the limit it began with

    def facts(
        self,
        options: SearchOptions,
        inspection: Inspection,
        space: Space,
        agreed: Fingerprint,
        asked: Mapping[str, str | int],
        model: str,
    ) -> SearchFacts:
        """What the study says of the search beside the trials."""
        assert agreed.memory_limit_bytes is not None
        return SearchFacts(
            fingerprint=fingerprint(inspection, space.techniques, agreed),
            task=inspection.facts.name,
            model=model,
            asked=dict(asked),
            objective=options.objective,
            memory_limit_bytes=agreed.memory_limit_bytes,
            headroom=options.headroom,
            space={name: tuple(choices) for name, choices in space.choices.items()},
            unsupported={n: why for n, why in inspection.unsupported.items() if n not in options.include},
            baseline_config=space.baseline.as_dict(),
            limited_beside=self.place.beside,
            ranked_beside=self.own.study if self.place.trained else "",
            signature=inspection.signature,
        )


@contextlib.contextmanager
def lock_places(
    options: SearchOptions,
    source: TaskSource | None,
    runner: Runner | None,
    fixed: Mapping[str, Choice],
    techniques: Techniques,
) -> Iterator[Kept]:
    """Lock a task's studies, and find the one of this search: beside the others where it has another memory limit.

    Args:
        fixed: choices that the user has fixed; of what they train, the search is kept apart.

    Raises:
        ConfigError: there is no task.
        StudyError: another search holds it, it cannot be written, or its name is a path.
    """
    if runner is not None:
        plain = place_of(options.storage, options.study or runner.default_study, runner.task_name)
    elif source is not None:
        plain = place_of(options.storage, options.study, source.name, source.version)
    else:
        raise ConfigError("no task was given; expected a task, or a runner that has one")
    place = plain.training(fixed, techniques)
    with lock_study(plain), storage_errors(place):
        kept = stored_facts(plain) or stored_facts(place)
        known = kept.fingerprint.memory_limit_bytes if kept else None
        if options.memory_limit_bytes is not None and known not in (None, options.memory_limit_bytes):
            plain = plain.within(options.memory_limit_bytes)
        place = plain.training(fixed, techniques)
        stored = stored_facts(place)
        yield Kept(place=place, stored=stored, own=plain, earlier=stored or stored_facts(plain))


def fingerprint(inspection: Inspection, techniques: Techniques, early: Fingerprint) -> Fingerprint:
    """All that must be equal for measurements to be comparable."""
    device, facts = inspection.device, inspection.facts
    return replace(
        early,
        autotune=__version__,
        techniques=tuple(techniques),
        choices={
            name: tuple(sorted(map(str, {*support.choices, *support.optional})))
            for name, support in inspection.support.items()
            if not techniques[name].ordered
        },
        task=facts.source_hash,
        num_parameters=facts.num_parameters,
        num_trainable=facts.num_trainable,
        parameter_bytes=facts.parameter_bytes,
        batch=facts.batch,
        device=f"{device.name} {device.model}",
        num_threads=device.num_threads,
        total_bytes=device.total_bytes,
        driver=device.driver,
        torch=device.torch_version,
        global_batch=inspection.global_batch,
        num_processes=inspection.known_world.size if inspection.known_world.size > 1 else None,
    )
