"""Where a search is kept: what it must agree on with an earlier search there, and what it takes over from that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autotune.devices.calibration import arithmetic
from autotune.devices.slots import Slots
from autotune.errors import ConfigError, StudyError
from autotune.records.config import Choice
from autotune.records.inspection import Inspection
from autotune.records.options import ONE_DEVICE, SearchOptions
from autotune.records.study import Fingerprint, SearchFacts, StudyFacts
from autotune.runners.compile_cache import KEPT, forget
from autotune.runners.runner import Runner
from autotune.space import Space, not_searched
from autotune.study.facts import agree_on_limit, limits_beside, stored_facts
from autotune.study.place import Place, lock_study, place_of, require_comparable
from autotune.study.storage import storage_errors
from autotune.task.source import TaskSource
from autotune.techniques import Techniques
from autotune.units import format_bytes
from autotune.version import __version__

MOST_OVER = 1.1  # the limit of a study may be so many times what is free
LEAST_USED = 7 / 8  # of what is free, by a study beside that is gone on with
LEAST_LEFT = 0.5  # of the limit of a study: with less free no search begins beside it
LIMIT_BITS = 5  # that count of a limit which is rounded: it is less than 1/16 below what is free


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

    def notes(self, options: SearchOptions) -> list[str]:
        """What the user should know of where the search is kept."""
        found = [self.place.note] if self.place.note else []
        if self.own.beside:
            found.append(
                f"the study {self.own.beside} has another memory limit; this search is kept beside it, in {self.place.study!r}"
            )
        if options.memory_limit_bytes is None and self.earlier and "memory_limit" in self.earlier.asked:
            limit = format_bytes(self.earlier.memory_limit_bytes)
            found.append(
                f"the memory limit of {limit} is the one that this study began with; another --memory-limit begins a study beside it"
            )
        return found

    def with_what_is_free(
        self, options: SearchOptions, free_bytes: int, tell: Callable[[str], None]
    ) -> tuple[SearchOptions, Kept]:
        """The options, and where the search is kept, with a limit that is free now where the study's is not and none was asked for.

        The limit is that of a study that an earlier search began so, else rounded. Searches that share a study do not part without
        being told to, and far less than the study's limit is too little for the same task.
        """
        earlier_bytes = self.earlier.fingerprint.memory_limit_bytes if self.earlier else None
        has_less = earlier_bytes is not None and MOST_OVER * free_bytes < earlier_bytes <= free_bytes / LEAST_LEFT
        if options.memory_limit_bytes is not None or self.place.is_shared or not has_less:
            return options, self
        tell(f"only {format_bytes(free_bytes)} are free now, less than this study's memory limit")
        step = 1 << max(0, free_bytes.bit_length() - LIMIT_BITS)
        about_free = [
            limit for limit in limits_beside(self.own) if LEAST_USED * free_bytes <= limit <= MOST_OVER * free_bytes
        ]
        limit_bytes = max(about_free, default=free_bytes // step * step)
        own, place = self.own.within(limit_bytes), self.place.within(limit_bytes)
        stored = stored_facts(place)
        beside = Kept(place=place, stored=stored, own=own, earlier=stored or stored_facts(own))
        return replace(options, memory_limit_bytes=limit_bytes), beside

    def training(self, choices: Mapping[str, Choice], techniques: Techniques) -> Kept:
        """The same, once it is known that the task trains some of what was fixed anyway, and `choices` are the others."""
        place = self.own.training(choices, techniques)
        return self if place == self.place else replace(self, place=place, stored=stored_facts(place))

    def agree(self, options: SearchOptions, free_bytes: int, *, environment: bool) -> Fingerprint:
        """What must be equal for measurements to be comparable, as far as it is known before the model is imported.

        Its memory limit is the one that the user asked for, else that of the study that is resumed, else what is free.

        Args:
            environment: whether what the environment says of the processor's arithmetic holds for the runner.

        Raises:
            StudyError: the memory limit of a study that is shared is not free here, or the study has other values.
        """
        limit_bytes = options.memory_limit_bytes
        earlier_bytes = self.earlier.fingerprint.memory_limit_bytes if self.earlier else None
        if limit_bytes is None and earlier_bytes is None:
            earlier_bytes = agree_on_limit(self.place, free_bytes)
        if limit_bytes is None and earlier_bytes is not None and earlier_bytes > MOST_OVER * free_bytes:
            study = (self.place if self.stored else self.own).study
            raise StudyError(
                f"the study {study} has a memory limit of {format_bytes(earlier_bytes)}, but only {format_bytes(free_bytes)} are free "
                "now; free memory, or give a --memory-limit that is free (memory_limit in a script), which begins a study beside it"
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

    def keep_compiled(self, runner: Runner) -> None:
        """Let the runner keep with the study what it compiles."""
        file, own = self.place.file, self.place.compiled
        forget(own.parent / KEPT)  # all that earlier versions kept, of whichever study
        if self.stored is None and not self.place.is_shared:
            # of a study that was deleted: how long compiling takes is measured without it
            forget(own)
            if file is not None and not file.exists():  # with all its studies
                forget(own.parent)
        runner.keep_compiled(own)

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
            unsupported=not_searched(
                inspection,
                space,
                include=tuple(options.include),
                exclude=tuple(options.exclude),
                frameworks=options.frameworks,
            ),
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
    slots: Slots | None = None,
) -> Iterator[Kept]:
    """Lock a task's studies, and find the one of this search: beside the others where it has another memory limit.

    Args:
        slots: where probes run at once; parts of a CPU train on fewer cores, which is kept apart.
        fixed: choices that the user has fixed. Where they change what is trained, the search is kept apart.

    Raises:
        ConfigError: there is no task.
        StudyError: another search holds it, it cannot be written, or its name is a path.
    """
    if runner is not None:
        study = runner.default_study if runner.default_study != runner.task_name else None
        plain = place_of(options.storage, options.study or study, runner.task_name, runner.version)
    elif source is not None:
        several = f"on {options.devices}" if options.devices != ONE_DEVICE else ""
        parts = len(slots.slots) if slots is not None and slots.slots[0].name != slots.slots[0].device else 1
        version = " ".join(filter(None, (source.version, several, f"on 1 of {parts} parts" if parts > 1 else "")))
        plain = place_of(options.storage, options.study, source.name, version)
    else:
        raise ConfigError("no task was given; expected a task, or a runner that has one")
    place = plain.training(fixed, techniques)
    with lock_study(plain), storage_errors(place):
        kept = stored_facts(place) or stored_facts(plain)  # which may have begun with different limits
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
