"""The answer as a training script in plain torch: every technique is spelled out, and nothing of autotune is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent, wrap

from autotune.devices import capabilities_of
from autotune.errors import ConfigError
from autotune.export.base import (
    NO_PLACES,
    Export,
    Exporter,
    SearchedChoices,
    lost_of,
    unknown_of_copies,
    unsaid_eval_batch,
    unsaid_of,
)
from autotune.export.source import Source
from autotune.records.config import ACCUMULATION, BATCH_KEYS, BATCH_SIZE, Choice
from autotune.records.options import torchrun_of
from autotune.records.result import Result
from autotune.task.model_file import ONE_OF_SEVERAL, SIGNATURES
from autotune.techniques import SPREAD, find_techniques
from autotune.techniques.frameworks import TORCH, At

# whose functions and imports the script's own lines use
_MODULES = (
    "autotune.task.batches",
    "autotune.task.losses",
    "autotune.task.adapters",
    "autotune.techniques.tensors.spread",
    "autotune.group",
    "autotune.shares",
    "autotune.step_loader",
    "autotune.session",
)
_DEFAULT_LOSS = '''

def training_step(model, batch):
    """The mean loss of a micro batch: the model's own for a dict, else cross entropy or the mean squared error."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        return output["loss"] if isinstance(output, Mapping) else output.loss
    x, y = batch
    output = model(x)
    if y.is_floating_point():
        return torch.nn.functional.mse_loss(output.reshape(y.shape), y)
    if output.shape[:-1] == y.shape:  # the classes are in the last dimension
        output, y = output.reshape(-1, output.shape[-1]), y.reshape(-1)
    return torch.nn.functional.cross_entropy(output, y.long(), ignore_index=-100)
'''
# what the functions of a task built in Python do, which a script cannot import
_YOURS = {
    "build_model": "return the model, on the CPU",
    "make_batch": "return a batch of that many samples, on the CPU",
    "training_step": "return the mean loss of a batch",
    "train_step": "take an optimizer step on a batch",
    "configure_optimizers": "return the optimizer of the model's parameters, as your own code makes it",
    "train_dataset": "return the training set",
    "collate_fn": "return the batch of a list of samples, on the CPU",
    "loss_weight": "return the number of terms that the mean loss of a batch averages over",
}
_YOUR_CONSTANTS = {
    "MAX_GRAD_NORM": "the norm that gradients are clipped to before each optimizer step",
    "VARIANTS": "the names that build_model takes",
}
_MODEL_FILE = """
# The model file, under a name that no other module has.
sys.path.insert(0, {folder})
spec = importlib.util.spec_from_file_location("model_of_the_search", {file})
model_file = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model_file)
"""
# Its processes find each other by what torchrun sets; a process group that is there already is used.
_WORLD = """
if not distributed.is_initialized():
    distributed.init_process_group("{backend}")
RANK, WORLD_SIZE = distributed.get_rank(), distributed.get_world_size()
if WORLD_SIZE != {number}:
    sys.exit("The answer is one for {number} processes{where}: {command} " + sys.argv[0])
"""
_LOADER = """

def counted(samples):
    \"\"\"A micro batch, and how many samples it has.\"\"\"
    return {collate}(samples), len(samples)


dataset = train_dataset()
{shared}loader = torch.utils.data.DataLoader(
    dataset,
    batch_size=BATCH_SIZE,
    collate_fn=counted,
{options})
"""
_STEPS = """

def steps():
    \"\"\"The micro batches of each optimizer step, with how many samples each has.{ends}\"\"\"
{streams}
    while {more}:
        yield micro_batches
"""
_MORE = "micro_batches := list(itertools.islice(batches, ACCUMULATION_STEPS))"
# the streams of several processes may end apart, and a process that goes on alone waits for the others
_MORE_OF_ALL = f"agree(len({_MORE}), DEVICE) and micro_batches"
_ENDS_FOR_ALL = " The first stream that ends, ends the pass in all processes."
_NUM_TERMS = """

def num_terms(batch, num_samples):
    \"\"\"What the mean loss of a micro batch averages over: targets that are not ignored, else samples.\"\"\"
    terms = default_weight(batch, shifts_labels=shifts_labels(model))
    return num_samples if terms is None else terms
"""
_WHOLE_STEP = "return train_step(model, optimizer, batch)"
_STEP = """

def step(micro_batches):
    \"\"\"Take one optimizer step. {told}\"\"\"
{body}
"""
# gradients are averaged over the processes, so that a share is one of all their terms, times their number
_TOGETHER = """
terms = {weights}
weights = torch.tensor(terms, dtype=torch.float64, device=DEVICE)
of_all = sum_over(weights.sum())
shares = torch.where(of_all > 0, weights * WORLD_SIZE / of_all, 1 / len(weights))
mean_loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
taken = with_terms([batch for batch, _ in micro_batches], terms, of_all)
for number, (batch, share) in enumerate(zip(taken, shares, strict=True)):
    with spread.synchronizing(number == len(weights) - 1):
        {micro}
        loss = loss * share.to(loss.dtype)
        {backward}
    mean_loss = mean_loss + torch.where(share > 0, loss.detach(), torch.zeros_like(loss))
""".strip()
_LOOP = """

if __name__ == "__main__":
    for number, micro_batches in enumerate(itertools.islice(steps(), NUM_STEPS), start=1):
        print(f"step {number}: {step(micro_batches)}")
"""
_LOOP_OF_SEVERAL = """

if __name__ == "__main__":
    for number, micro_batches in enumerate(itertools.islice(steps(), NUM_STEPS), start=1):
        loss = step(micro_batches)
        if RANK == 0:
            print(f"step {number}: {loss}")
    distributed.destroy_process_group()
"""
_ONE_SEED = "seed_everything(max(gather(torch.initial_seed() % 2**53)))"
_OWN_SEED = "seed_everything(torch.initial_seed() + RANK)"
_NUM_STEPS = 100
_OF_PLACES = re.compile(r"\{(places|modules)\}")
_WIDTH = 116  # of a comment


class PlainTorch(Exporter):
    """A file that takes the session's steps when it is run in the folder in which the search was run.

    A step that runs out of memory is not taken again in smaller micro batches, as a session's is.
    """

    name = TORCH
    summary = "a training script in plain torch, without autotune"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """What the techniques need first, then model, optimizer, data, the step and the loop.

        Raises:
            ConfigError: the task is a LightningModule, whose steps are its Trainer's.
        """
        if "LightningModule" in result.subject.parts:
            raise ConfigError("a LightningModule is trained by its Trainer, not by a loop of torch; use --to lightning")
        script = _Script(result)
        return Export(script.text(), script.unsaid)


class _Script:
    """The script of an answer.

    Attributes:
        said: place -> lines.
        unsaid: technique, or what else the answer has -> why it is not in the script.
    """

    def __init__(self, result: Result) -> None:
        self.result = result
        self.is_of_file = bool(result.subject.model and result.subject.parts)
        self.parts = set(result.subject.parts) or {"build_model", "make_batch", "training_step"}
        self.accumulates = int(result.config[ACCUMULATION]) > 1
        self.streams = "IterableDataset" in self.parts
        self.num_processes = result.subject.num_processes
        self.together = self.num_processes > 1
        self.weighs = self.accumulates or self.together
        self.source = Source()
        self.techniques = find_techniques()
        self.said: dict[At, list[str]] = {place: [] for place in At}
        self.unsaid: dict[str, str] = {}
        self.lost = lost_of(self.techniques, result, (TORCH,))
        for name, choice in result.config.items():
            if name in self.techniques and choice != self.techniques[name].off:
                self._say(name, choice)
            elif name not in (*self.techniques, *BATCH_KEYS):
                self.unsaid[name] = f"no technique of that name is installed here, so {choice!r} cannot be translated"
        self.unsaid |= {**unsaid_eval_batch(result), **unknown_of_copies(result)}

    def _say(self, name: str, choice: Choice) -> None:
        technique = self.techniques[name]
        lines = technique.write(TORCH, choice, optimizer=technique.said_of)
        why = self.lost.get(name, "")
        if lines is None:
            why = "it has no lines of plain torch"
        elif name not in self.result.places and any(_OF_PLACES.search(text) for text in lines.values()):
            why = NO_PLACES
        elif At.LOADER in lines and "train_dataset" not in self.parts:
            why = "it is of a data loader, and the script makes each batch by make_batch"
        if why or lines is None:
            self.unsaid[name] = unsaid_of(technique, choice, why)
            return
        found = self.result.places.get(name, {})
        places = ", ".join(f"{role}={json.dumps(names)}" for role, names in found.items())
        for place, text in lines.items():
            said = text.replace("{places}", places).replace("{modules}", json.dumps(found.get("modules")))
            self.said[At(place)].append(said)
            is_named = place in (At.LOADER, At.SPREAD)
            self.source.bring(f"dict({said})" if is_named else said, type(technique).__module__)

    def text(self) -> str:
        """The file."""
        loop = _LOOP_OF_SEVERAL if self.together else _LOOP
        own = "\n".join((*self._settings(), *self._model(), *self._data(), *self._step(), loop))
        self.source.bring(own, *_MODULES)
        early = ["import os", *self.said[At.ENVIRONMENT], ""] if self.said[At.ENVIRONMENT] else []
        loading = {"import importlib.util", "import sys"} if self.is_of_file else set()
        loading |= {"import os", "import sys"} if self.together else set()
        imports = {"import itertools", *loading, *self.source.import_lines()}
        ordered = sorted(imports, key=lambda line: (line.startswith("from "), line))
        head = [*self._comment(), "", "from __future__ import annotations", "", *early, *ordered, "", "import torch"]
        brought = (f"\n\n{definition}" for definition in self.source.definitions.values())
        return "\n".join([*head, "", *self._yours(), *brought, "", "", own])

    def _started(self) -> tuple[str, str]:
        return torchrun_of(str(self.result.goal.asked.get("devices", "")), self.num_processes)

    def _comment(self) -> Iterator[str]:
        result = self.result
        lines = [
            f"The answer of the search {result.study} as a training script in plain torch: {self.techniques.describe(result.config)}.",
            "Run it in the folder of the search. `step`, at its end, takes an optimizer step.",
            f"It seeds nothing. It ends after {self._end()}.",
        ]
        if self.together:
            where, command = self._started()
            lines[1:] = [
                f"Start it in the folder of the search{', ' if where else ''}{where}: {command} THIS_FILE. "
                "`step`, at its end, takes an optimizer step over all processes.",
                "Once the model is built, all processes seed with the largest of their seeds, and once the dataset is, each with "
                f"that plus its own number. It ends after {self._end()}.",
            ]
        if "configure_optimizers" in self.parts and "train_step" not in self.parts:
            lines.append("It steps no learning-rate scheduler, even if `configure_optimizers` returns one.")
        lines += [f"The search warned: {warning}" for warning in result.warnings]
        if self.unsaid:
            lines.append("NOT IN THIS SCRIPT, though part of the answer:")
        lines += [f"- {name}: {why}" for name, why in self.unsaid.items()]
        yield from (f"# {line}" for text in lines for line in wrap(text, _WIDTH, break_on_hyphens=False))

    def _end(self) -> str:
        steps = "NUM_STEPS optimizer steps"
        return f"one pass over the dataset, or {steps} if they come first" if "train_dataset" in self.parts else steps

    def _yours(self) -> Iterator[str]:
        """The functions and constants of the model file."""
        if not self.is_of_file:
            yield "# YOUR CODE: replace these."
            used = self._used()
            yield from (f"{name} = ...  # {what}" for name, what in _YOUR_CONSTANTS.items() if name in used)
            for name in (name for name in _YOURS if name in used):
                given = ONE_OF_SEVERAL if name == "build_model" and "VARIANTS" in self.parts else SIGNATURES[name]
                yield f"\n\ndef {name}({', '.join(given)}):\n    raise NotImplementedError({json.dumps(_YOURS[name])})"
            return
        file, attribute = self.result.subject.model_file
        yield _MODEL_FILE.format(folder=json.dumps(str(Path(file).parent)), file=json.dumps(file)).strip("\n")
        owner = f"model_file.{attribute}" if attribute else "model_file"
        yield from (f"{name} = {owner}.{name.lower() if attribute else name}" for name in sorted(self._used()))

    def _used(self) -> set[str]:
        used = {"build_model", "training_step", "train_step", "configure_optimizers", "MAX_GRAD_NORM"}
        used |= set() if self.said[At.BUILD] else {"VARIANTS"}
        used |= {"train_dataset", "collate_fn"} if "train_dataset" in self.parts else {"make_batch"}
        return self.parts & (used | ({"loss_weight"} if self.weighs else set()))

    def _settings(self) -> Iterator[str]:
        config = self.result.config
        each = " of each process" if self.together else ""
        yield f"BATCH_SIZE = {config[BATCH_SIZE]}  # samples of a micro batch{each}"
        yield f"ACCUMULATION_STEPS = {config[ACCUMULATION]}  # micro batches of an optimizer step{each}"
        yield f"NUM_STEPS = {_NUM_STEPS}"
        device = self.result.subject.device
        kind = device.partition(":")[0]
        on_gpu = capabilities_of(kind).own_processors
        one_each = self.together and on_gpu
        yield (
            f'DEVICE = torch.device("{kind}", int(os.environ["LOCAL_RANK"]))'
            if one_each
            else (f'DEVICE = torch.device("{device}")')
        )
        if on_gpu:
            yield "torch.cuda.set_device(DEVICE)"
        if self.together:
            where, command = self._started()
            started = {"where": f"; start it {where}" if where else "", "command": command}
            backend = capabilities_of(kind).collectives
            yield _WORLD.format(backend=backend, number=self.num_processes, **started).strip("\n")
        yield from self.said[At.PROCESS]

    def _model(self) -> Iterator[str]:
        """Model and optimizer."""
        variant = self.said[At.BUILD] or (["VARIANTS[0]"] if "VARIANTS" in self.parts else [])
        yield ""
        yield f"model = build_model({', '.join(variant)}).train().to(DEVICE)"
        if "PreTrainedModel" in self.parts:
            yield "switch_off_caches(model)"
        yield from self.said[At.MODEL]
        if self.together:
            yield from (_ONE_SEED, "start_equal(model)")
            yield from self._spread()
        if "train_step" in self.parts and "configure_optimizers" in self.parts:
            yield "optimizer = configure_optimizers(model)"
        elif "configure_optimizers" in self.parts:
            yield "optimizer, = optimizers_in(configure_optimizers(model))"
        else:
            yield "optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)"
        yield from self.said[At.OPTIMIZER]
        yield from (f"optimizer = {changed}" for changed in self.said[At.OPTIMIZERS])
        yield from (f"scaler = {scaler}" for scaler in self.said[At.SCALER])
        if self.together and "train_dataset" not in self.parts:
            yield _OWN_SEED

    def _spread(self) -> Iterator[str]:
        """What runs the model with its collectives."""
        options = [*self.said[At.SPREAD]]
        sharded = any(option.startswith("blocks=") for option in options)
        if not sharded and self.result.places.get(SPREAD, {}).get("find_unused_parameters"):
            options.append("find_unused_parameters=True")
        yield f"spread = {'shards' if sharded else 'copies'}("
        yield indent(",\n".join(("model", *options)), "    ") + ","
        yield ")"

    def _data(self) -> Iterator[str]:
        """`steps`, which yields what each `step` takes."""
        batches = "batches = ((make_batch(BATCH_SIZE), BATCH_SIZE) for _ in itertools.count())"
        if "train_dataset" in self.parts:
            options = self.said[At.LOADER]
            shared = ""
            if self.together:
                shared, options = self._shared(options)
            elif not any(option.startswith("sampler=") for option in options):
                options = ["shuffle=not isinstance(dataset, torch.utils.data.IterableDataset)", *options]
            collate = "collate_fn" if "collate_fn" in self.parts else "torch.utils.data.default_collate"
            if self.result.subject.has_batchnorm and not self.streams:
                number = "-(-len(dataset) // WORLD_SIZE)" if self.together else "len(dataset)"
                options = [*options, f"drop_last=leaves_one_out({number}, BATCH_SIZE)"]
            said = "".join(f"    {option},\n" for option in options)
            yield _LOADER.format(collate=collate, shared=shared, options=said).rstrip("\n")
            batches = "batches = iter(loader)"
        streams = [batches, *(f"batches = {stream}" for stream in self.said[At.BATCHES])]
        ends, more = (_ENDS_FOR_ALL, _MORE_OF_ALL) if self.together and self.streams else ("", _MORE)
        yield _STEPS.format(ends=ends, streams=indent("\n".join(streams), "    "), more=more).rstrip("\n")

    def _shared(self, options: list[str]) -> tuple[str, list[str]]:
        """Lines before the loader, and its options, by which each process reads samples of its own."""
        seed = f"{_OWN_SEED}\n(seed, *_) = gather(int(torch.randint(2**31, ())))\n"
        if self.streams:
            return f"{seed}dataset = StreamShare(dataset, WORLD_SIZE, RANK, seed)\n", options
        order = [option.removeprefix("sampler=") for option in options if option.startswith("sampler=")]
        shared = (
            f"OrderShare({order[0]}, WORLD_SIZE, RANK, BATCH_SIZE, seed)"
            if order
            else "torch.utils.data.DistributedSampler(dataset, seed=seed)"
        )
        return seed, [f"sampler={shared}", *(option for option in options if not option.startswith("sampler="))]

    def _step(self) -> Iterator[str]:
        """`step`."""
        if not {"training_step", "train_step"} & self.parts:
            yield _DEFAULT_LOSS.rstrip("\n")
        if "train_step" in self.parts:
            body = ["((batch, _),) = micro_batches", *self._ready(), *self._within(At.OWN_STEP, [_WHOLE_STEP])]
            yield _def_step("Returns what `train_step` returns.", self._within(At.STEP, body))
            return
        if self.weighs and not {"training_step", "loss_weight"} & self.parts:
            yield _NUM_TERMS.rstrip("\n")
        loss = "spread.run(training_step, batch)" if self.together else "training_step(model, batch)"
        micro = [*self._ready(), *self._within(At.FORWARD, [f"loss = {loss}"])]
        backward = "scaler.scale(loss).backward()" if self.said[At.SCALER] else "loss.backward()"
        weights = f"[{self._weight()} for batch, num_samples in micro_batches]"
        result = "mean_loss"
        if self.together:
            body = _TOGETHER.format(
                weights=weights, micro=indent("\n".join(micro), " " * 8).strip(), backward=backward
            ).splitlines()
            result = "sum_over(mean_loss / WORLD_SIZE).to(loss.dtype)"
            told = "Micro batches weigh what they have in the mean over all processes. Returns that mean loss."
        elif self.accumulates:
            taken = ["if share == 0:  # no label of it counts", "    continue", *micro, "loss = loss * share"]
            taken += [backward, "mean_loss = mean_loss + loss.detach()"]
            body = [
                f"shares = shares_of({weights})",
                "mean_loss = torch.zeros((), device=DEVICE)",
                "for (batch, _), share in zip(micro_batches, shares, strict=True):",
                *(f"    {line}" for line in taken),
            ]
            told = "Micro batches weigh what they have in the mean over the whole batch. Returns that mean loss."
        else:
            body = ["((batch, _),) = micro_batches", *micro, backward, "mean_loss = loss.detach()"]
            told = "Returns the mean loss."
        if self.together:
            yield "\n\nwith_terms = WithTerms()"
        yield _def_step(told, [*self._within(At.STEP, body), *self._update(), f"return {result}"])

    def _ready(self) -> list[str]:
        return ["batch = to_device(batch, DEVICE)", *self.said[At.BATCH]]

    def _weight(self) -> str:
        if "loss_weight" in self.parts:
            return "float(loss_weight(batch))"
        return "num_samples" if "training_step" in self.parts else "num_terms(batch, num_samples)"

    def _update(self) -> Iterator[str]:
        scales = bool(self.said[At.SCALER])
        if scales:
            yield "scaler.unscale_(optimizer)"
        if "MAX_GRAD_NORM" in self.parts:
            yield "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)"
        yield from ["scaler.step(optimizer)", "scaler.update()"] if scales else ["optimizer.step()"]
        yield "optimizer.zero_grad(set_to_none=True)"

    def _within(self, place: At, lines: list[str]) -> list[str]:
        """The lines inside the contexts of that place."""
        if not self.said[place]:
            return lines
        return [f"with {', '.join(self.said[place])}:", *(f"    {line}" for line in lines)]


def _def_step(told: str, body: Sequence[str]) -> str:
    return _STEP.format(told=told, body=indent("\n".join(body), "    ")).rstrip("\n")
