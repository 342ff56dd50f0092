"""Checks that a config still trains as the user does: compares loss, gradients, buffers and names with plain fp32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from autotune.coupling.draws import RandomDraws
from autotune.devices import Device, open_device
from autotune.group import deal, take_from_first
from autotune.probe.differences import Difference, Values, difference, worst
from autotune.probe.runs import SEED, Runs, deal_parts
from autotune.randomness import keep_randomness, seed_everything
from autotune.records.check import REDUCED_GRADIENT_ERROR, Check
from autotune.records.config import ACCUMULATION, ALONE, BATCH_KEYS, BATCH_SIZE, Choice, Config, World
from autotune.task import Task
from autotune.task.batches import CannotCutError
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.base import MANTISSA_BITS

EXACT_ERROR = 1e-5  # relative error that reordering sums in fp32 causes
NOISE_FACTOR = 10.0  # an exact technique may differ by so many times the model's own noise
REDUCED_COSINE = 0.999
REDUCED_SIZE_ERROR = 0.2  # of the gradient's norm: in any model rounding turns the gradient, and hardly scales it
REDUCED_LOSS_ERROR = 0.05
REDUCED_BUFFER_ERROR = 0.05
# Times the error of rounding the parameters alone. A layer in a short type rounds four tensors (weight, input, output and its gradient);
# as these are independent, they err twice as much as one. With batch normalisation a single rounding can already err by 20 %.
ROUNDING_FACTOR = 2.0
# If the model's rounding needs a larger bound than this, a wrong gradient differs hardly more than a right one.
TELLING_ERROR = 0.5
TELLING_COSINE = 0.875  # the same angle, at equal norms
# Error of the parameters after several steps, relative to how far they moved. Adam divides a gradient by its own size, so the
# rounding of a gradient near zero decides the whole step.
MOVEMENT_ERROR = 1e-3
NO_NOISE = Difference(loss=0.0, gradient=0.0, cosine=1.0, size=0.0, buffers=0.0, movement=0.0)
DOUBLE_ERROR = 1e-9  # in double precision, where fp32 disagrees: as far above rounding as `EXACT_ERROR` is in fp32


def run_checks(
    task: Task,
    config: Config | Mapping[str, Choice],
    device: str | Device,
    *,
    batch_size: int,
    world: World = ALONE,
) -> Check:
    """Compare a config with plain fp32 on one batch: the same weights, the same samples, the same seed.

    Check G compares the loss and all gradients, B the buffers after one optimizer step, N the names of parameters and
    of the state dict. Where the config's techniques are exact, they may have a relative error of 1e-5 or ten times the
    model's own noise, which is looked for where that matters, and `Technique.check_steps` asks for more steps. Otherwise the
    gradient's cosine must be 0.999, or the error at most twice that of plain fp32 with parameters rounded to the same type, and
    the gradient's size must be right within 20 %. The check is undecided where the model magnifies rounding so much that a
    wrong gradient differs hardly more than a right one. Checkpointing, optimizer and loader are compared with dropout on, since
    they must keep its random state. If a config also changes dtype, layout or micro batch, dropout is the identity on both
    sides: check each technique alone, too.

    Args:
        config: complete or partial; its batch size is ignored. A config that accumulates gets the samples in two micro batches,
            where the task can cut a batch.
        device: where to compare; process-wide settings and random states are restored.
        batch_size: samples to compare on; in a world a multiple of the number of processes, of twice that if it accumulates.
        world: the processes that train with the config, each on its part of the samples, compared with the first of them, which
            trains plainly on all. If the model normalises over a batch, they are compared with plain copies on the same parts, which
            normalise alike. The first one alone makes the samples, runs plainly and holds whole copies; the others wait for it, as
            long as the process group does.

    Returns:
        What was found, in all processes of the world.

    Raises:
        UnsupportedError: the config cannot be applied to the model on the device.
        TaskError: the task is not valid.
        ConfigError: the config is not valid.
    """
    techniques = find_techniques()
    config = techniques.complete(config)
    task = techniques.narrow_task(task, config)  # what is trained is not compared: plain fp32 is to train the same
    task = dataclasses.replace(task, global_batch=None)  # one small batch is compared, not the global one
    device = open_device(device) if isinstance(device, str) else device
    with keep_randomness(device.torch_device):
        if world.rank > 0:
            others = Runs(task, device, None, deal(), techniques, num_steps=1, same_masks=False, world=world)
            check: Check = others.take_part()
            return check
        config = config.replace(**techniques.trained({}))
        check = _Comparison(task, config, device, batch_size, techniques, world).check()
        return check if world.size == 1 else take_from_first(check)


class _Comparison:
    """Runs a config and plain training one after the other, from the same weights on the same batch."""

    def __init__(
        self,
        task: Task,
        config: Config,
        device: Device,
        batch_size: int,
        techniques: Techniques,
        world: World,
    ) -> None:
        self.task = task
        self.device = device
        self.batch_size = batch_size
        self.techniques = techniques
        self.world = world
        changes = dict(techniques.switched_on(config))
        accumulation: dict[str, Choice] = {ACCUMULATION: config.accumulation_steps}
        self.switched = (accumulation if config.accumulation_steps > 1 else {}) | changes
        self.asked_steps = 2 if config.accumulation_steps > 1 and batch_size > 1 else 1
        self.micro_steps = self.asked_steps if _can_be_cut(task) else 1
        each = batch_size // world.size
        self.config = config.replace(batch_size=-(-each // self.micro_steps), accumulation_steps=self.micro_steps)
        used = [techniques[name] for name in changes]
        self.exact = all(technique.exact for technique in used)
        self.changes_learning = any(technique.changes_learning for technique in used)
        # Another dtype, another memory layout and micro batches draw other masks anyway, which says nothing of gradients.
        self.same_masks = (
            world.size == 1 and self.micro_steps == 1 and all(technique.keeps_random_masks for technique in used)
        )
        self.num_steps = max((technique.check_steps for technique in used), default=1) if self.exact else 1
        self.mantissa_bits = MANTISSA_BITS[techniques.arithmetic_of(config)]
        self.plain = techniques.complete({BATCH_SIZE: batch_size})
        self.notes: list[str] = []  # what the user should know besides

    def check(self) -> Check:
        """Run everything and judge."""
        seed_everything(SEED)
        batch = self.task.batch(self.batch_size)
        part = deal_parts(self.task, batch, self.batch_size, self.world)
        options = (self.techniques, self.num_steps, self.same_masks, self.world)
        runs = Runs(self.task, self.device, batch, part, *options)
        plain = alone = runs.run(self.plain)
        as_copies = runs.batch_statistics and self.world.size > 1 and not self.changes_learning
        if as_copies:
            plain = runs.run(self.plain, together=True)
        candidate = runs.run(self.config, together=True)
        found, noise = difference(plain, candidate), NO_NOISE
        if self.complaints(found, noise):
            noise = worst(
                difference(alone, runs.run(self.plain)),
                difference(alone, runs.run(self.plain, prepare_model=_move_by_one_ulp)),
            )
        complaints, noise, undecided = self._judge(runs, plain, found, noise)
        cause = tuple(self.causes(runs, plain, candidate, noise)) if complaints else ()
        notes = self.notes
        names_equal = plain.names == candidate.names
        if self.micro_steps < self.asked_steps:
            notes.append("accumulation is not compared: only the task itself can make smaller batches")
        if not names_equal:
            complaints.append("the names of parameters or the keys of the state dict changed")
        if self.world.size > 1:
            others = (
                "plain copies on the same parts, as the model normalises over a batch" if as_copies else "one process"
            )
            notes.append(f"{self.world.size} processes on {self.batch_size} samples were compared with {others}")
        if self.num_steps > 1:
            notes.append(
                f"parameters after {self.num_steps} steps differ by {found.movement:.1e} of how far they moved"
            )
        if noise.gradient > REDUCED_GRADIENT_ERROR:
            notes.append("two plain runs differ as much, so this comparison says little about the technique")
        if cause and len(self.switched) > 1:
            complaints.insert(0, self.blamed(cause))
        return Check(
            technique="config",
            choice=", ".join(f"{name}={choice}" for name, choice in self.switched.items()) or "nothing switched on",
            exact=self.exact,
            loss_error=found.loss,
            gradient_error=found.gradient,
            gradient_cosine=found.cosine,
            buffer_error=found.buffers,
            names_equal=names_equal,
            noise=noise.gradient,
            passed=None if undecided and names_equal else not complaints,
            num_samples=self.batch_size,
            cause=cause,
            reason="; ".join([*complaints, *notes]),
        )

    def _judge(
        self, runs: Runs, plain: Values, found: Difference, noise: Difference
    ) -> tuple[list[str], Difference, bool]:
        """Complain of a difference, unless the model's own noise, single roundings or its batch statistics explain it.

        Returns:
            The complaints, none where the config passes; the noise, which includes other random draws where the config makes
            them; and whether the model magnifies rounding so far that the comparison says little.
        """
        complaints = self.complaints(found, noise)
        if complaints and not self.same_masks:  # the effect of other random draws is the model's own noise
            draws = RandomDraws()
            others = difference(plain, runs.run(self.plain, seed=SEED + 1, draws=draws))
            if draws.seen or self.micro_steps > 1:
                noise = worst(noise, others)
                complaints = self.complaints(found, noise)
        notes, undecided = self.notes, False
        if complaints and self.micro_steps > 1 and runs.batch_statistics:
            notes.append(
                "expected: batch normalisation sees one micro batch at a time, so accumulation learns otherwise"
            )
        elif complaints and self.exact and (error := self.error_in_double(runs)) <= DOUBLE_ERROR:
            complaints = []
            notes.append(
                f"the gradient differs by {found.gradient:.1e}, because single roundings decide in this model; "
                f"in double precision it differs by {error:.1e}"
            )
        elif complaints and not self.exact:
            rounded = difference(plain, runs.run(self.plain, prepare_model=self.round_parameters))
            complaints = self.complaints(found, noise, rounded)
            undecided = not complaints and not (found.gradient <= TELLING_ERROR and found.cosine >= TELLING_COSINE)
            notes.append(
                f"the gradient's cosine with plain fp32 is {found.cosine:.3f}: with parameters rounded as far, plain fp32 "
                f"itself has {rounded.cosine:.3f} in this model"
            )
            if undecided:
                notes.append("so this comparison tells little in this model")
        return complaints, noise, undecided

    def causes(self, runs: Runs, plain: Values, candidate: Values, noise: Difference) -> Iterator[str]:
        """The keys of the config that make it differ: its micro batches, its exact techniques or its reduced precision."""
        reference = plain
        if self.micro_steps > 1:
            reference = runs.run(self.plain.replace(**{name: self.config[name] for name in BATCH_KEYS}))
            rest = self.complaints(difference(reference, candidate), noise)
            if not rest or self.complaints(difference(plain, reference), noise):
                yield ACCUMULATION
            if not rest:
                return
        names = [name for name in self.switched if name in self.techniques]
        reduced = [name for name in names if not self.techniques[name].exact]
        exact = [name for name in names if self.techniques[name].exact]
        if reduced and exact:
            off = {name: self.techniques[name].off for name in exact}
            alone = difference(reference, runs.run(self.config.replace(**off), together=True))
            names = reduced if self.complaints(alone, noise) else exact
        yield from names

    def blamed(self, cause: Sequence[str]) -> str:
        """The cause of the difference, in words."""

        def words(name: str) -> str:
            if name == ACCUMULATION:
                return "cutting the batch into micro batches, which changes the gradient of plain fp32 as well"
            kind = "" if self.techniques[name].exact else ", whose precision is reduced"
            return f"{name}={self.switched[name]}{kind}"

        return f"the cause is {' and '.join(map(words, cause))}"

    def error_in_double(self, runs: Runs) -> float:
        """The largest error when model and data are in double precision; infinite where the model does not run so.

        A rounding that flips one ReLU changes a convolutional network's gradient by a percent, but only in some runs. In
        double precision that does not happen, while a wrong technique stays wrong.
        """
        double = runs.in_double()
        try:
            found = difference(double.run(self.plain), double.run(self.config, together=True))
        except RuntimeError as error:
            if not double.runs_not(error):
                raise
            return math.inf
        errors = (found.loss, found.gradient, found.buffers, found.movement)
        return math.inf if any(math.isnan(error) for error in errors) else max(errors)

    def round_parameters(self, model: torch.nn.Module) -> None:
        """Round every parameter to as many bits as the config's arithmetic keeps: 8 for bf16, 11 for fp16 and TF32."""
        steps = 2.0**self.mantissa_bits
        with torch.no_grad():
            for parameter in filter(torch.is_floating_point, model.parameters()):
                mantissa, exponent = torch.frexp(parameter)
                parameter.copy_(torch.ldexp((mantissa * steps).round() / steps, exponent))

    def complaints(self, found: Difference, noise: Difference, rounded: Difference | None = None) -> list[str]:
        """The bounds that are exceeded, in words. Comparisons are written so that NaN exceeds them.

        Args:
            rounded: how plain fp32 differs with parameters rounded to the config's arithmetic, where that was run.
        """
        reduced = (REDUCED_LOSS_ERROR, REDUCED_GRADIENT_ERROR, REDUCED_BUFFER_ERROR)
        least_loss, least_gradient, least_buffers = (EXACT_ERROR,) * 3 if self.exact else reduced
        lowest = min(REDUCED_COSINE, 1 - NOISE_FACTOR * (1 - noise.cosine))
        if rounded is not None:
            least_loss = max(least_loss, ROUNDING_FACTOR * rounded.loss)
            least_gradient = max(least_gradient, ROUNDING_FACTOR * rounded.gradient)
            least_buffers = max(least_buffers, ROUNDING_FACTOR * rounded.buffers)
            # 1 - cosine grows with the square of the angle
            lowest = min(lowest, 1 - ROUNDING_FACTOR**2 * (1 - rounded.cosine))
        bounds = (
            ("the loss differs", found.loss, least_loss, noise.loss),
            ("the gradient differs", found.gradient, least_gradient, noise.gradient),
            ("the gradient's size differs", found.size, REDUCED_SIZE_ERROR, noise.gradient),
            ("buffers differ", found.buffers, least_buffers, noise.buffers),
            ("the parameters' movement differs", found.movement, MOVEMENT_ERROR, noise.movement),
        )
        allowed = [(what, error, max(least, NOISE_FACTOR * floor)) for what, error, least, floor in bounds]
        out = [f"{what} by {e:.1e} from plain fp32 (bound {bound:.1e})" for what, e, bound in allowed if not e <= bound]
        if not self.exact and not found.cosine >= lowest:
            out.append(f"the gradient's cosine with plain fp32 is {found.cosine:.5f} (bound {lowest:.3f})")
        return out


def _can_be_cut(task: Task) -> bool:
    """Whether a batch can be cut into two micro batches, so that plain training can see the same samples at once."""
    try:
        task.cuts()
    except CannotCutError:
        return False
    return True


def _move_by_one_ulp(model: torch.nn.Module) -> None:
    """Move every parameter by about one unit in its last place, which hardly changes a well-conditioned model's results."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
