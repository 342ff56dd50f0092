"""What earlier studies teach a search, and what it leaves for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import ConfigError, StudyError
from autotune.prediction.priors import NOTHING_TAUGHT, Lesson, Taught
from autotune.records.inspection import Inspection
from autotune.records.options import SearchOptions
from autotune.records.priors import Circumstances, PriorStudy, name_of
from autotune.records.result import Result
from autotune.records.study import Fingerprint
from autotune.study.priors import PriorStore
from autotune.study.reading import load_study, studies_in
from autotune.techniques import Techniques
from autotune.tuning.state import Search


def recall(
    store: PriorStore | None,
    options: SearchOptions,
    inspection: Inspection,
    known: Fingerprint,
    techniques: Techniques,
    *,
    is_resumed: bool,
) -> tuple[Inspection, Taught]:
    """What the study of `options.like` teaches; without one what like studies in the store do.

    Also the inspection, with the seconds that compiling took there.

    Args:
        store: None where nothing is remembered, as in a replay.
        known: the fingerprint of the search.
        is_resumed: whether the search goes on with a study, whose own trials would count twice if it taught itself.

    Raises:
        StudyError: `options.like` cannot be read, or its baseline was not measured.
    """
    here = Circumstances.of(inspection.signature, known, inspection.baseline)
    taught = NOTHING_TAUGHT
    own = name_of(inspection.facts.name, known) if is_resumed else ""
    if options.like is not None:
        given = prior_of(options.like, here, own)
        taught = Taught.by([Lesson.of(given, here, same_model=True)], techniques, options.objective)
    elif store is not None and not options.no_priors and here.signature is not None:
        others = [study for study in store.studies() if study.name != own]
        taught = Taught.by([Lesson.of(study, here) for study in others], techniques, options.objective)
    return with_known_setups(inspection, taught, here.device), taught


def with_known_setups(inspection: Inspection, taught: Taught, device: str) -> Inspection:
    """The inspection, with the seconds that compiling took in like studies on this device in place of those that are expected of any.

    Args:
        device: its name and model, as in a fingerprint.
    """
    support = {
        name: replace(
            found, setup_s=tuple((c, taught.compile_cold_s(name, c, device) or seconds) for c, seconds in found.setup_s)
        )
        for name, found in inspection.support.items()
    }
    return replace(inspection, support=support)


def prior_of(path_or_url: str, here: Circumstances, own: str = "") -> PriorStudy:
    """What a study leaves. Of several in one storage it is the one most alike, or the one searched last of those that are equally so.

    Args:
        own: name of the study that the search goes on with, which is taken only where there is no other.

    Raises:
        StudyError: it cannot be read, or its baseline was not measured.
    """
    names: Sequence[str | None] = studies_in(path_or_url) or [None]  # of no study, `load_study` tells why
    studies = [load_study(path_or_url, study=name) for name in names]
    left = [PriorStudy.of(study.facts, study.probes, study.result, study.facts.searched_at) for study in studies]
    found = [study for study in left if study is not None]
    if not found:
        raise StudyError(
            f"like: {path_or_url} teaches nothing, because no baseline with anything beside it was measured there; give another"
        )
    return max(found, key=lambda one: (one.name != own, here.likeness(one.circumstances), one.searched_at))


def leave_priors(search: Search, result: Result | None) -> None:
    """Remember what the search's study found, for later searches."""
    facts = search.store.facts
    found = PriorStudy.of(facts, search.history.searched, result, facts.searched_at)
    if search.priors is not None and facts.signature is not None and found is not None:
        search.priors.keep(found)


def require_one_way(options: SearchOptions) -> None:
    """Raise ConfigError where the options name a study to learn from, and say to learn from none."""
    if options.like is not None and options.no_priors:
        raise ConfigError(f"--like {options.like} and --no-priors contradict each other; leave one out")


def in_words(taught: Taught) -> str:
    """What a search begins with, for the user; empty where that is nothing."""
    named = [f"{lesson.study.name} ({lesson.likeness:.0%} alike)" for lesson in taught.lessons[:3]]
    more = len(taught.lessons) - len(named)
    if not named:
        return ""
    studies = ", ".join(named) + (f" and {more} more" if more else "")
    if taught.first is not None:
        begins = "begins with what earlier searches taught"
    elif taught.blame:  # the speeds that were measured there do not count
        begins = "expects to fail what failed in earlier searches"
    else:
        return ""
    return f"{begins}: {studies}; --no-priors begins without"
