"""The protocol of exporters: each says an answer in other words, and lists the keys that cannot be said there.

`arguments` says it as the arguments that frameworks take, each technique in its own words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from autotune.records.config import BATCH_SIZE, Choice
from autotune.records.options import torchrun_of
from autotune.records.result import Result
from autotune.techniques import SPREAD, Phase, Technique, Techniques, find_techniques, shards_parameters
from autotune.techniques.frameworks import (
    ACCELERATE,
    BATCH,
    DATALOADER,
    DEEPSPEED,
    EVAL_BATCH,
    LIGHTNING,
    TORCH,
    TRANSFORMERS,
    merge,
)

SearchedChoices = Mapping[str, Sequence[Choice]]  # technique -> choices that were searched; may lack some or all
_AS_MEASURED = {DATALOADER: {"shuffle": True}}  # as a session's loader; a stream has an order of its own
# give the micro batches of a step equal weights; transformers counts labels
_ALIKE = {ACCELERATE, DEEPSPEED, LIGHTNING}
_OVER_ACCELERATE = {ACCELERATE, TRANSFORMERS}  # the second trains by the first
_BY_TORCH = {*_OVER_ACCELERATE, LIGHTNING, TORCH}  # spread models by DDP, and by FSDP block by block
ALIKE_THERE = (
    "micro batches count alike there, whatever their numbers of terms (labels that count, say): multiply the loss of each by its terms "
    "over the mean number of terms of the step's micro batches"
)
NO_PLACES = "the study does not say which modules it acted on; search again"


@dataclass(frozen=True)
class Export:
    """An answer in other words.

    Attributes:
        text: as it goes into a file, without a newline at its end.
        unsaid: key of the config, or what else the answer was trained with -> why it is not in the text.
    """

    text: str
    unsaid: Mapping[str, str] = field(default_factory=dict)


class Exporter(ABC):
    r"""Says an answer in the words of something else. Stateless.

    `export` is all that is called. A whole exporter:

        class Toml(Exporter):
            name = "toml"
            summary = "the config as a table of TOML"

            def export(self, result: Result, *, space: SearchedChoices) -> Export:
                words = {"amp": "precision", "batch_size": "micro_batch"}  # its own, for what it knows
                said = {words[key]: choice for key, choice in result.config.items() if key in words}
                unsaid = {key: "this file has no word for it" for key in result.config if key not in words}
                return Export("\n".join(f"{word} = {json.dumps(choice)}" for word, choice in said.items()), unsaid)

    `autotune export --to NAME` exists because its file is there; another package offers one as an entry point in the group
    `autotune.exporters`. Where a framework has arguments of its own that several exporters or integrations share, they stand in
    the `frameworks` of each technique (`autotune.techniques.frameworks`), and `arguments` gathers them.

    Attributes:
        name: the NAME of `--to NAME`.
        summary: one line for the help.
        says_any_config: it prints the keys and choices of a config as they are, so that it also says the answer for a script's own
            command line, whose choices have no other words.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    says_any_config: ClassVar[bool] = False

    @abstractmethod
    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """Say the answer."""


def arguments(
    result: Result,
    space: SearchedChoices,
    frameworks: Sequence[str],
    no_words: str,
    *,
    with_defaults: bool = False,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Say an answer's config in the words of one or several frameworks.

    A technique that is off is said too where there are words for it, unless that is known to be the framework's default. What the
    user's own file trains needs no words.

    Args:
        space: technique -> choices that were searched; may lack some or all.
        frameworks: keys of `Technique.frameworks`.
        no_words: why a technique that is on and that none of them can say is not said.
        with_defaults: say the framework's defaults, too, as where there are arguments that say something else.

    Returns:
        framework -> its arguments; key of the config (or `eval_batch_size`, `loss_weight`) -> why it is in none of them.
    """
    as_measured = {} if "IterableDataset" in result.subject.parts else _AS_MEASURED
    said: dict[str, dict[str, Any]] = {framework: {**as_measured.get(framework, {})} for framework in frameworks}
    unsaid: dict[str, str] = {}
    techniques = find_techniques()
    lost = lost_of(techniques, result, frameworks)
    users_own = techniques.trained({}).keys() - result.subject.trained.keys()
    for name, choice in result.config.items():
        searched = space.get(name, ())
        choices = searched if len(searched) > 1 else ()
        words = [words_of(techniques, each, name, choice, choices, result.subject.optimizer) for each in frameworks]
        if name in lost:
            words = [None] * len(frameworks)
        for framework, found in zip(frameworks, words, strict=True):
            if with_defaults or name not in techniques or not techniques[name].is_default(framework, choice):
                said[framework] = merge(said[framework], found or {})
        if all(found is None for found in words):
            if name not in techniques:
                unsaid[name] = f"no technique of that name is installed here, so {choice!r} cannot be translated"
            elif choice != techniques[name].off and name not in users_own:
                unsaid[name] = unsaid_of(techniques[name], choice, lost.get(name, no_words))
    if (size := eval_batch_size(result)) is not None:
        for framework in EVAL_BATCH.keys() & set(frameworks):
            said[framework] |= EVAL_BATCH[framework].write(size)
    if not EVAL_BATCH.keys() & set(frameworks):
        unsaid |= unsaid_eval_batch(result)
    if counts_terms(result) and _ALIKE & {*frameworks}:
        unsaid["loss_weight"] = ALIKE_THERE
    if SPREAD not in unsaid and not techniques.is_off(SPREAD, result.config.get(SPREAD, techniques[SPREAD].off)):
        unsaid |= _said_of_shards(techniques, result, frameworks)
    return said, unsaid


def counts_terms(result: Result) -> bool:
    """Whether a step has several micro batches that weigh as many terms as the loss of each has: labels, say, not samples.

    The task says how many, or its model of Hugging Face has a loss of its own, which averages over the labels that count.
    """
    several = int(result.config.get("accumulation_steps", 1)) * result.subject.num_processes > 1
    parts = {*result.subject.parts}
    by_model = "PreTrainedModel" in parts and not {"training_step", "train_step", "LightningModule"} & parts
    return several and ("loss_weight" in parts or by_model)


def unsaid_of(technique: Technique, choice: Choice, why: str) -> str:
    """Why a choice is not said, with its label where that is not the key itself."""
    label = technique.label(choice)
    return why if label == technique.name else f"{label}: {why}"


def eval_batch_size(result: Result) -> int | None:
    """The batch size to evaluate with; None where nobody asked for it, and where none was found."""
    return None if result.evaluation is None else result.evaluation.eval_batch_size


def unsaid_eval_batch(result: Result) -> dict[str, str]:
    """The batch size to evaluate with, for which the text has no word; nothing where none was found."""
    size = eval_batch_size(result)
    return {} if size is None else {"eval_batch_size": f"{size}: give it to the `DataLoader` that you evaluate with"}


def unsaid_clipping(result: Result, argument: str) -> dict[str, str]:
    """That a model file clips gradients, which the text does not say; nothing where it does not, or the user's script does.

    Args:
        argument: what the framework clips by.
    """
    clips = result.subject.model and "MAX_GRAD_NORM" in result.subject.parts
    return {"max_grad_norm": f"the file's MAX_GRAD_NORM clips gradients: give it to {argument}"} if clips else {}


def unsaid_last_sample(result: Result, argument: str = "DataLoader(drop_last=True)") -> dict[str, str]:
    """That a session leaves out a last micro batch of one sample, which the text does not say; nothing where there is none to leave out.

    Args:
        argument: what leaves out a last micro batch.
    """
    subject = result.subject
    has_end = "train_dataset" in subject.parts and "IterableDataset" not in subject.parts
    if not (subject.has_batchnorm and has_end and int(result.config[BATCH_SIZE]) > 1):
        return {}
    return {
        "drop_last": "a session leaves out a last micro batch of one sample, of which batch normalisation may have no statistics: say "
        f"{argument} where the dataset ends with one"
    }


def launching(result: Result) -> dict[str, str]:
    """How the answer's number of processes is said where the text has no word for it; nothing where one trains alone."""
    number = result.subject.num_processes
    if number == 1:
        return {}
    where, command = torchrun_of(str(result.goal.asked.get("devices", "")), number)
    started = f"start the script {where}{', ' if where else ''}with `{command}`"
    return {"num_processes": f"{number}: {f'run {result.command}' if result.command else started}"}


def unknown_of_copies(result: Result) -> dict[str, str]:
    """What DDP has to be told of copies of a model, and no measurement of the answer says; nothing where it is known."""
    if result.subject.num_processes == 1 or shards_parameters(result.config) or SPREAD in result.places:
        return {}
    return {
        "find_unused_parameters": "the study does not say whether the loss leaves parameters out; search again, or set it where DDP "
        "raises that some have no gradient"
    }


def lost_of(techniques: Techniques, result: Result, frameworks: Sequence[str]) -> dict[str, str]:
    """Techniques that a framework has words for, and does not do on the device, or would do to other modules: why not."""
    if not shards_parameters(result.config):
        return {}
    if _OVER_ACCELERATE & {*frameworks} and result.subject.device.startswith("cpu"):
        why = "Accelerate shards parameters on GPUs alone, and trains copies of the model on a CPU"
    elif _BY_TORCH & {*frameworks} and SPREAD not in result.places:
        why = NO_PLACES
    else:
        return {}
    return {name: why for name, technique in techniques.items() if technique.phase is Phase.SPREAD}


def _said_of_shards(techniques: Techniques, result: Result, frameworks: Sequence[str]) -> dict[str, str]:
    """What the words of techniques that are on do to shards besides."""
    on = {name: choice for name, choice in result.config.items() if name in techniques}
    return {
        name: unsaid_of(techniques[name], choice, words.on_shards)
        for name, choice in on.items()
        for framework in frameworks
        if choice != techniques[name].off and (words := techniques[name].frameworks.get(framework)) and words.on_shards
    }


def words_of(
    techniques: Techniques,
    framework: str,
    name: str,
    choice: Choice,
    choices: Sequence[Choice] = (),
    optimizer: str = "",
) -> dict[str, Any] | None:
    """A framework's arguments for one key of a config; None where it has no words for it. The rest is as in `Technique.write`."""
    if name in BATCH:
        return BATCH[name][framework].write(choice) if framework in BATCH[name] else None
    return techniques[name].write(framework, choice, choices, optimizer=optimizer) if name in techniques else None
