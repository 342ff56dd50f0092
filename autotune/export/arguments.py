"""An answer as the arguments that frameworks take, each technique in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.export.base import Space
from autotune.records.result import Result
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.frameworks import ACCELERATE, BATCH, DATALOADER, DEEPSPEED, EVAL_BATCH, LIGHTNING

_AS_MEASURED = {DATALOADER: {"shuffle": True}}  # as a session's loader, unless the dataset or a sampler has an order
_ALIKE = {
    ACCELERATE,
    DEEPSPEED,
    LIGHTNING,
}  # give the micro batches of a step equal weights; transformers counts labels


def arguments(
    result: Result, space: Space, frameworks: Sequence[str], no_words: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Say an answer's config in the words of one or several frameworks.

    A technique that is off is said too where there are words for it, since the framework's default may differ. What the
    user's own file trains needs no words.

    Args:
        space: technique -> choices that were searched; may lack some or all.
        frameworks: keys of `Technique.frameworks`.
        no_words: why a technique that is on and that none of them can say is not said.

    Returns:
        framework -> its arguments; key of the config (or `eval_batch_size`, `loss_weight`) -> why it is in none of them.
    """
    said: dict[str, dict[str, Any]] = {framework: {**_AS_MEASURED.get(framework, {})} for framework in frameworks}
    unsaid: dict[str, str] = {}
    techniques = find_techniques()
    users_own = techniques.trained({}).keys() - result.subject.trained.keys()
    for name, choice in result.config.items():
        words = {framework: _words(techniques, framework, name, result, space) for framework in frameworks}
        for framework, found in words.items():
            said[framework] |= found or {}
        if all(found is None for found in words.values()):
            if name not in techniques:
                unsaid[name] = f"no technique of that name is installed here, so {choice!r} cannot be translated"
            elif choice != techniques[name].off and name not in users_own:
                unsaid[name] = f"{techniques[name].label(choice)}: {no_words}"
    if result.evaluation is not None and (size := result.evaluation.eval_batch_size) is not None:
        for framework in EVAL_BATCH.keys() & set(frameworks):
            said[framework] |= EVAL_BATCH[framework].write(size)
        if not EVAL_BATCH.keys() & set(frameworks):
            unsaid["eval_batch_size"] = f"{size}: give it to the `DataLoader` that you evaluate with"
    accumulates = int(result.config.get("accumulation_steps", 1)) > 1
    if "loss_weight" in result.subject.parts and accumulates and _ALIKE & {*frameworks}:
        unsaid["loss_weight"] = (
            "micro batches count alike there, whatever their numbers of terms: multiply the loss of each by its terms over the "
            "mean number of terms of the step's micro batches"
        )
    return said, unsaid


def _words(techniques: Techniques, framework: str, name: str, result: Result, space: Space) -> dict[str, Any] | None:
    choice = result.config[name]
    if name in BATCH:
        return BATCH[name][framework].write(choice) if framework in BATCH[name] else None
    if name not in techniques:
        return None
    searched = space.get(name, ())
    searched = searched if len(searched) > 1 else ()
    return techniques[name].write(framework, choice, searched, optimizer=result.subject.optimizer)
