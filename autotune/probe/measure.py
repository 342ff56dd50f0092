"""One measured training run inside a probe's process: warm-up, timed blocks, memory peak, signs of trouble."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

import torch

from autotune.devices import Device
from autotune.group import Together, gather
from autotune.probe.compiler import num_graph_breaks, num_graphs
from autotune.probe.finite import Losses, NonFiniteError, require_finite_gradients
from autotune.probe.leaks import kept
from autotune.probe.long_run import LongRun
from autotune.probe.observers.base import Observers
from autotune.probe.passes import MicroBatches
from autotune.probe.timing import MIN_BLOCKS, MIN_WARMUP_STEPS, Reporter, Timing, micro_steps_per_block
from autotune.probe.waiting import NUM_COMPARED, Ranks, RankTimes, find_copies, last_times, tell_of_each_pass
from autotune.probe.warm_steps import WarmStep, compile_s_of, telling_steps, typical_step
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Measurement, Progress
from autotune.session import Session
from autotune.task.batches import StepBatch, fresh_copy

MAX_SCALER_STEPS = 40  # GradScaler halves from 65536: 40 skips mean that it never settles
MAX_CYCLE_S = 1.0  # while warming up, an accumulation cycle is ended after so long
SLICE_ABOVE_S = 0.3  # an optimizer step longer than this is timed by its parts
# A micro step longer than this is split by phase while it is timed, as to wait for the device in between costs nothing, and the last
# step of its warm-up counts: a single block is then long enough to see other work in it.
LONG_S = 0.3
AHEAD_S = 0.25  # batches that were drawn before the seed's order began are trained before timing if that takes no longer than this
LEFT_OUT_S = 0.5  # so long such batches are drawn and not trained, where samples differ
MAX_COMPARED_S = 2.0  # of micro steps whose ranks are compared


@dataclass
class Run:
    """One probe's run in progress. Its state survives a failure."""

    session: Session
    device: Device
    settings: ProbeSettings
    report: Callable[[Progress], None]  # is told how far the run has come, since the process may be killed at any time
    num_steps: int = 0
    warm_steps: list[WarmStep] = field(default_factory=list)
    counts_starts: ClassVar[bool] = True  # of passes over the training set
    _meets_shapes: bool = False  # whether a micro batch of a new shape is trained once before its time counts
    _met_s: float = 0.0  # seconds of that
    _num_met: int = 0  # micro batches of that
    _gradients: list[tuple[torch.nn.Parameter, Callable[[], torch.Tensor]]] = field(default_factory=list)
    # whether what is clocked bounds the speed: not in the first step, nor with the largest batches where batches differ
    _tells_speed: bool = False

    def __post_init__(self) -> None:
        self.losses = Losses(self.session)
        self._micro_batches = MicroBatches(self.session)
        self._long_run = LongRun(self.session, self.device, self._train_without_update, self.settings.seed)
        self._graph_breaks_before, self._graphs_before = num_graph_breaks(), num_graphs()
        config, world = self.session.config, self.session.world
        samples, is_bound = config.batch_size * world.data_parallel, world.size == 1 or config.accumulation_steps == 1
        self.reporter = Reporter(self.report, self.device.peak_bytes, samples, is_bound)
        self._samples = config.plan_in(world).samples_per_step
        unequal = self.session.task.dataset() is not None
        self._observers = Observers(self.device, world)
        self._together = Together(world, self.session.device)
        self._ranks: Ranks | None = None  # known once the step was split by phase
        self._timing = Timing(self.settings, self._samples, self._peak_bytes, unequal)

    def measure(self, setup_s: float) -> Measurement:
        """Warm up, time, and measure.

        Raises:
            NonFiniteError: the loss or a gradient is not finite.
            Exception: whatever the user's code or an allocation raises.
        """
        self._began_s = time.perf_counter() - setup_s
        self.warm_up()
        self._begin_in_order()
        warmup_s = self.reporter.train_s
        self.reporter.enter("timing")
        timed_s = 0.0
        phases: dict[str, float] = {}
        # a world synchronizes once a step, but warm-up steps of one micro batch do each time, so they look too slow if it accumulates
        may_cut = self.session.world.size == 1 or self.session.config.accumulation_steps == 1
        if not (cut_short := may_cut and self._timing.cut_short(self._whole_steps_s())):
            phases = self._time()
            timed_s = self.reporter.train_s - warmup_s
            if self.settings.phases and not phases:
                phases = self._phases()
        self._meets_shapes = False
        is_alone = self.session.world.size == 1  # else each would leave out blocks of its own
        # `verify` meets no shape before it is timed
        if self.settings.num_steps and is_alone and self._long_run.shapes.recur:
            self._timing.blocks.leave_out_new_shapes()
        within = self.counts_starts and self._timing.blocks.leave_out_starts()
        measured = self._timing.measurement(
            num_steps=self.num_steps,
            num_shapes=self._long_run.shapes.num_seen,
            num_shapes_expected=self._long_run.shapes.num_expected(),
            setup_s=setup_s,
            warmup_s=warmup_s,
            timed_s=timed_s,
            explained_s=self.reporter.train_s - warmup_s - timed_s,
            compile_s=compile_s_of(self.warm_steps),
            num_graph_breaks=num_graph_breaks() - self._graph_breaks_before,
            num_recompilations=num_graphs() - self._first_graphs,
            phases_s=phases,
            waits_s=() if self._ranks is None else self._ranks.waits_s,
            slow_rank=None if self._ranks is None else self._ranks.slow_rank,
            final_loss=float(self.losses.last),
            skipped_steps=self._skipped_steps(),
            cut_short=cut_short,
            places=self.session.places,
        )
        measured = self._with_start_wait(self._observers.stop(measured), within=within)
        if self._long_run.shapes.are_several and self.session.world.size == 1:
            measured = replace(measured, phases_s=_in_proportion(measured.phases_s, measured.step_s))
        # a time-out would lose the measurement, so nothing more is trained where that might not end in time
        alone = self.session.world.size == 1  # if that failed in one process, the others would wait
        before_s = time.perf_counter()
        grown = self._with_growth(measured, may_train=alone and self._spent_s <= self.settings.timeout_s / 2)
        growth_s = time.perf_counter() - before_s
        return replace(grown, growth_s=growth_s, shapes_recur=self._long_run.shapes.recur)  # it may have looked at more

    def _with_growth(self, measured: Measurement, *, may_train: bool) -> Measurement:
        """The measurement with what memory grows by in a long run, and what of it is a leak."""
        if known_bytes := self.settings.known_long_run_peak_bytes:
            return replace(measured, long_run_growth_bytes=max(0, known_bytes - measured.peak_bytes))
        small_size = self._small_size if may_train else None
        # nothing more is trained for a config that is too slow, nor in the play-off: a probe has told
        may_train_small = not measured.cut_short and not self.settings.known_peak_bytes
        whole = map(self._take, repeat(1))
        known = None if measured.cut_short else self.settings.shape_growth
        growth = self._long_run.growth(whole, small_size if may_train_small else None, known)
        per_shape = 0.0 if growth is None else growth.bytes_per_shape
        if may_train and (measured.growth_bytes_per_step or per_shape):
            take = partial(self._take, 1)
            # where the probe's steps were too few to see them grow
            if small_size is not None and not measured.growth_bytes_per_step:
                take = partial(self._long_run.draw, small_size)
            with contextlib.suppress(Exception):  # memory may run out, say
                measured = replace(measured, leaks=kept(lambda: self._step_with(take())))
        # a leak is in every config, and has no end
        leaked_bytes = sum(one.num_bytes for one in measured.leaks)
        grown_bytes = measured.growth_bytes_per_step / self.session.config.accumulation_steps or per_shape
        is_leak = bool(measured.leaks) and grown_bytes <= 2 * leaked_bytes
        if is_leak or not growth or not per_shape:
            return replace(measured, shape_growth=None if is_leak else growth)
        growth, num_shapes, long_run_growth_bytes = self._long_run.expect(
            growth,
            is_known=known is not None,
            num_shapes=self.settings.num_shapes,
            countable=whole if may_train and not self._has_compiled else (),
            micro_batches=self._micro_batches if may_train else (),
        )
        return replace(
            measured,
            shape_growth=growth if may_train else None,  # else few batches have told how many shapes come
            long_run_growth_bytes=long_run_growth_bytes,
            num_shapes_expected=num_shapes,
        )

    @property
    def _small_size(self) -> int | None:
        """Samples of a small batch; None where such batches cannot be drawn, and where each might be compiled anew."""
        return None if self._has_compiled else self._long_run.small_size(typical_step(self.warm_steps).micro_s)

    @property
    def _has_compiled(self) -> bool:
        """Whether something was compiled in this run: each new shape might be compiled anew."""
        return num_graphs() > self._graphs_before

    def _with_start_wait(self, measured: Measurement, *, within: bool) -> Measurement:
        """The measurement where the wait at the start of each pass over the training set has its share in the time of every sample.

        Args:
            within: whether what was timed lies within passes.
        """
        num_samples = self.session.loader.num_samples
        if not self.counts_starts or num_samples is None or measured.cut_short:
            return measured
        # a time-out would lose the measurement
        may_measure = self._spent_s <= self.settings.timeout_s / 2
        own_s = self._micro_batches.start_wait_s(measured.samples_per_s, may_measure=may_measure)
        return measured.with_start_wait(self._together.largest(own_s), num_samples, within=within)

    def warm_up(self) -> float:
        """Take three optimizer steps or more (of long ones two), until they settle, then finish one accumulation cycle.

        Returns the seconds of compiling, or of loading compiled code from the cache.

        The first step takes one micro batch, and makes the optimizer's state. The next one takes the largest. Accumulation peaks when
        one micro batch's activations lie beside the gradients of the earlier ones and that state: where such gradients cannot be made
        ahead, it is taken twice. If batches differ, its time does not count as typical. The other steps take one micro batch. Where the
        peak is known, all steps do. Of long micro steps the first two are enough: the second and the one after it are blocks, which are
        followed by more unless they agree as two steps of a warm-up do. There is no cycle where steps are long or the peak is known.
        """
        self.reporter.enter("warmup")
        is_peak_known = self.settings.known_peak_bytes > 0
        accumulation_steps = self.session.config.accumulation_steps
        # made before the first step: loading the widest samples is no part of a step, whose time is watched
        largest = None if is_peak_known else self._largest_batches(min(2, accumulation_steps))
        compiling_s = self._warm_step(self._take(1))
        self._first_graphs = num_graphs()
        while not self._has_taken(1):
            compiling_s += self._warm_step(self._take(1))
        if largest is not None:
            are_alike = self.session.task.dataset() is None or not self._long_run.shapes.are_several
            # where it begins with all gradients one is enough; the other is held meanwhile, as those of a step are
            num_trained = 1 if self._begins_with_all else len(largest)
            trained = StepBatch(zip(largest[:num_trained], largest.sizes, strict=False))
            compiling_s += self._warm_step(trained, is_typical=are_alike)
        # `verify` trains as the user does; and where several train together, all would have to meet a shape at once
        is_alone = self.session.world.size == 1 and not self.session.task.takes_whole_steps
        self._meets_shapes = is_alone and not self.settings.num_steps
        if self._are_two_enough:
            return compile_s_of(self.warm_steps)
        while True:
            compiling_s += self._warm_step(self._take(1))
            warm = self._timing.is_warm(
                len(self.warm_steps), self._whole_steps_s(), self.reporter.train_s - compiling_s
            )
            if self._has_taken(2) and warm and not self.warm_steps[-1].compiled:
                break
        if is_peak_known or self.warm_steps[-1].micro_s > LONG_S:
            return compile_s_of(self.warm_steps)
        missing = accumulation_steps - sum(step.num_micro for step in self.warm_steps)
        cycle_started_s = self.reporter.train_s
        if missing > 0:
            while missing > 0 and self.reporter.train_s - cycle_started_s < MAX_CYCLE_S:
                self._clock(lambda: self._accumulate_part(self._take(1)), 1)
                self._observe(self._observers.sample_warmup)
                missing -= 1
            self._clock(self._update)
        return compile_s_of(self.warm_steps)

    @property
    def _are_two_enough(self) -> bool:
        """Whether two steps were taken, and the second tells how long one takes, at more than `LONG_S` a micro batch.

        It is a block then, and those after it show whether it was warm. A process of the play-off, which splits no step by phase, and a
        config that would not be timed at all take a third step.
        """
        settings = self.settings
        if not settings.phases or settings.num_steps or self.session.world.size > 1 or settings.min_timed_s > LONG_S:
            return False
        if len(self.warm_steps) != 2 or self.session.scaler is not None:
            return False
        second = self.warm_steps[-1]
        is_told = second.is_typical and not second.compiled and second.micro_s > LONG_S
        return is_told and not self._timing.is_hopeless(self._whole_steps_s())

    def _begin_in_order(self) -> None:
        """Let timing begin with the first sample of the seed's order, if that takes little time or samples differ.

        The batches that come before it are trained, or drawn and left out where that would take long. Where a pass over the training set
        is shorter than those, timing begins somewhere in that order.
        """
        num_ahead, typical = self.session.loader.begin_again(self.settings.seed), typical_step(self.warm_steps)
        if num_ahead * (typical.micro_s + typical.update_s) > AHEAD_S:
            num_ahead = self._leave_out(num_ahead, typical.micro_s) if self._long_run.shapes.are_several else 0
        for _ in range(num_ahead):
            self._warm_step(self._take(1))

    def _leave_out(self, num_ahead: int, micro_s: float) -> int:
        """Draw so many batches and train none of them; where data workers load, all but one, if they load a batch within a micro step.

        Returns:
            How many are to be trained yet: one, while data workers load those that come next; none if time is up before it.
        """
        num_trained = min(1, self.session.loader.num_workers)
        if num_trained and self._micro_batches.longest_load_s > micro_s:
            return 0
        ends_s = time.perf_counter() + LEFT_OUT_S
        for _ in range(num_ahead - num_trained):
            if time.perf_counter() > ends_s:
                return 0
            next(self._micro_batches)
        return num_trained

    def _largest_batches(self, count: int) -> StepBatch:
        """The largest micro batch, some times: of the widest samples; one like all others where batches are made."""
        task, size = self.session.task, self.session.config.batch_size
        largest = self._take(1)[0] if task.dataset() is None else task.batch(size)
        self._long_run.shapes.note_chosen(largest)
        # training may change a batch in place
        return StepBatch([(largest, size), *((fresh_copy(largest), size) for _ in range(count - 1))])

    def _warm_step(self, batch: StepBatch, *, is_typical: bool = True) -> float:
        """Take a step. Returns its seconds if something was compiled in it, else 0."""
        known = num_graphs()
        self._tells_speed = is_typical and bool(self.warm_steps)
        self._begin_with_gradients()
        accumulated_s = self._clock(partial(self._accumulate_part, batch), len(batch))
        self.losses.require_finite(self.num_steps + 1)
        if 0 < len(self.warm_steps) < MIN_WARMUP_STEPS and self.session.scaler is None:
            require_finite_gradients(self.session.model, self.num_steps + 1)
        self._note_gradients()
        update_s = self._clock(self._update)
        self._observe(self._observers.sample_warmup)
        compiled = self._together.largest(num_graphs() - known) > 0
        self.warm_steps.append(WarmStep(accumulated_s / len(batch), update_s, compiled, len(batch), is_typical))
        return accumulated_s + update_s if compiled else 0.0

    def _observe(self, look: Callable[[float], None]) -> None:
        """Note how much memory is held now, and let the observers look: a micro batch is a share of a step."""
        self._long_run.look()
        look((self.reporter.num_micro_steps + self._num_met) / self.session.config.accumulation_steps)

    def _whole_steps_s(self) -> list[float]:
        """Seconds of a whole optimizer step, estimated from each warm-up step that tells the speed."""
        return [step.whole_s(self.session.config.accumulation_steps) for step in telling_steps(self.warm_steps)]

    def _has_taken(self, count: int) -> bool:
        """Whether the GradScaler has let so many steps through. Before the first, the optimizer has no state, and the peak is too low.

        A step that was not skipped has allocated the state (plain SGD has none), and one more has run beside it.
        """
        if self.session.scaler is None or self.num_steps - self._skipped_steps() >= count:
            return True
        if self.num_steps >= MAX_SCALER_STEPS:
            raise NonFiniteError(f"GradScaler skipped {self._skipped_steps()} of the first {self.num_steps} steps")
        return False

    def _skipped_steps(self) -> int:
        """The number of skipped steps: each halves the scale, which grows only every 2000 steps."""
        scaler = self.session.scaler
        if scaler is None or not scaler.is_enabled():
            return 0
        return max(0, round(math.log2(scaler._init_scale / scaler.get_scale())))

    def _time(self) -> dict[str, float]:
        """Time one block, and more until there are enough.

        Returns:
            Seconds of one optimizer step by phase, where the first block was split so; else nothing.
        """
        config, blocks = self.session.config, self._timing.blocks
        data_s = self._together.largest(self._micro_batches.usual_wait_s)  # warm-up steps are clocked without it
        typical = typical_step(self.warm_steps).after(data_s)
        step_s = typical.whole_s(config.accumulation_steps)
        exact = self.settings.num_steps
        may_slice = not exact and self.session.world.size == 1
        # whole steps would be more samples than others of the play-off's round take
        are_many = 0 < self.settings.num_samples < MIN_BLOCKS * self._samples
        num_micro = micro_steps_per_block(
            typical.micro_s,
            step_s,
            config.accumulation_steps,
            by_parts=may_slice and (are_many or step_s > SLICE_ABOVE_S),
        )
        sliced, steps_per_block = num_micro < config.accumulation_steps, num_micro // config.accumulation_steps
        is_long = may_slice and typical.micro_s > LONG_S
        phases: dict[str, float] = {}
        if is_long and not self._long_run.shapes.are_several:  # those before the seed's order may be more work, or less
            self._count_settled(data_s)
        self._observers.start()
        num_whole = 0
        is_done = False
        while not is_done:
            starts_before = self._micro_batches.num_starts
            if is_long and self.settings.phases and not phases:
                phases = self._phases()
                step_s = sum(phases.values())
                update_s = phases.get("optimizer", 0.0)
                micro_s = (step_s - update_s) / config.accumulation_steps
                blocks.add(self._samples / step_s, micro_s + update_s, num_samples=config.batch_size)
            elif sliced:
                self._begin_with_gradients()
                slice_s = self._clock(lambda: self._accumulate_part(self._take(num_micro)), num_micro)
                update_s = self._clock(self._update)
                full_s = slice_s * config.accumulation_steps / num_micro + update_s
                blocks.add(
                    self._samples / full_s,
                    slice_s + update_s,
                    num_samples=num_micro * config.batch_size,
                    starts=self._micro_batches.num_starts - starts_before,
                )
            else:
                count = min(steps_per_block, exact - num_whole) if exact else steps_per_block
                num_shapes = self._long_run.shapes.num_seen
                block_s = self._clock(partial(self._steps, count), count * config.accumulation_steps)
                blocks.add(
                    count * self._samples / block_s,
                    block_s,
                    num_samples=count * self._samples,
                    starts=self._micro_batches.num_starts - starts_before,
                    has_new_shapes=self._long_run.shapes.num_seen > num_shapes,
                )
                num_whole += count
            self.losses.require_finite(self.num_steps)
            self._observe(self._observers.sample)
            is_done = self._timing.is_done(num_whole, self._spent_s)
        self._observers.end()
        return phases

    def _count_settled(self, data_s: float) -> None:
        """Make a block of the warm-up's last step, with which the run had settled, or which those after it show to be warm.

        Where something is to be watched for longer than a micro step, nothing of the warm-up counts: observers come after it.

        Args:
            data_s: of waiting for a batch.
        """
        if self.settings.min_timed_s > LONG_S:
            return
        self._timing.blocks.is_first_warm = len(self.warm_steps) >= MIN_WARMUP_STEPS
        step = self.warm_steps[-1].after(data_s)
        whole_s = step.whole_s(self.session.config.accumulation_steps)
        self._timing.blocks.add(self._samples / whole_s, step.micro_s + step.update_s)

    @property
    def _spent_s(self) -> float:
        """Seconds so far, setup included."""
        return self._together.largest(time.perf_counter() - self._began_s)

    def _peak_bytes(self) -> int:
        """The peak of the process that needs the most, here or as it is known."""
        return round(max(self._together.largest(self.device.peak_bytes()), self.settings.known_peak_bytes))

    def _phases(self) -> dict[str, float]:
        """Seconds of one optimizer step by phase, from a micro step and an update with synchronization between phases."""
        accumulation_steps = self.session.config.accumulation_steps
        taken: list[StepBatch] = []
        loss: list[torch.Tensor] = []
        waited_before_s = self._micro_batches.waited_s
        data_s = self._seconds(lambda: taken.append(self._take(1)))
        data_s -= self._micro_batches.waited_s - waited_before_s  # at the start of a pass: its share is counted apart
        batch = taken[0]
        self._begin_with_gradients()
        if self.session.task.takes_whole_steps:
            step_s = self._seconds(lambda: self._accumulate(batch))
            self.reporter.trained(data_s + step_s, 1, tells_speed=True)
            self._update()
            return {"data": data_s, "train_step": step_s}
        forward_s = self._seconds(lambda: loss.append(self.session.loss(batch[0])))
        scaler = self.session.scaler
        scaled = loss[0] if scaler is None else scaler.scale(loss[0])
        backward_s = self._seconds(scaled.backward)
        self.reporter.trained(data_s + forward_s + backward_s, 1, tells_speed=True)
        if not self._counts(batch):
            self._clear_gradients()
        elif self.session.world.size == 1:
            self.losses.note(loss[0].detach())
        micro_s = {"data": data_s, "forward": forward_s, "backward": backward_s}
        phases = {name: seconds * accumulation_steps for name, seconds in micro_s.items()} | {
            "optimizer": self._clock(self._update)
        }
        self._ranks = self._compare_ranks()
        return phases if self._ranks is None else phases | self._ranks.phases_s(accumulation_steps)

    def _compare_ranks(self) -> Ranks | None:
        """What each rank computes and waits for in a few more micro steps, where all hold copies of the model."""
        if self.session.world.size == 1 or (copies := find_copies()) is None:
            return None
        tell_of_each_pass(copies)
        times: list[RankTimes | None] = []
        spent_s = 0.0
        while len(times) <= NUM_COMPARED and spent_s < MAX_COMPARED_S:  # as long in all ranks
            spent_s += self._clock(self._take_micro_step)
            times.append(last_times(copies))
        return Ranks.of(gather([one for one in times[1:] if one is not None]))

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._accumulate(self._take(self.session.config.accumulation_steps))
            self._update()

    def _take_micro_step(self) -> None:
        self._step_with(self._take(1))

    def _step_with(self, batch: StepBatch) -> None:
        self._accumulate_part(batch)
        self._update()

    def _train_without_update(self, batch: StepBatch) -> None:
        self._accumulate(batch)
        self._clear_gradients()

    def _take(self, count: int) -> StepBatch:
        batch = StepBatch(next(self._micro_batches) for _ in range(count))
        of_size = zip(batch, batch.sizes, strict=True)
        new = [(micro, size) for micro, size in of_size if self._long_run.shapes.note(micro)]
        if new and self._meets_shapes:
            self._meet(new)
        return batch

    def _meet(self, micro_batches: list[tuple[Any, int]]) -> None:
        """Train micro batches of new shapes before their time counts, if training meets these shapes again and again.

        Libraries make kernels for each new shape: the first micro batch of one took 16 ms more than the next, of 45 ms, in a recognizer of
        speech. A short run meets many new shapes, the more of them the smaller its micro batches are, and a long one hardly any. What that
        takes is little beside a long micro step. Data workers that do not keep up would load meanwhile, in time that is not counted.
        """
        known = self.settings.shapes_recur
        if not (self._long_run.shapes.recur if known is None else known) or not telling_steps(self.warm_steps):
            return
        micro_s = typical_step(self.warm_steps).micro_s
        if micro_s > LONG_S or not self._micro_batches.surely_keep_up(micro_s):
            return
        self.device.synchronize()
        started = time.perf_counter()
        for micro, size in micro_batches:
            self._accumulate_part(StepBatch([(fresh_copy(micro), size)]))
        self._num_met += len(micro_batches)
        self._clear_gradients()
        self.device.synchronize()
        self._met_s += time.perf_counter() - started

    def _accumulate(self, batch: StepBatch) -> None:
        self.losses.note(self.session.accumulate(batch))

    def _accumulate_part(self, batch: StepBatch) -> None:
        """Like `_accumulate`, for some micro batches of a step.

        If none of them has a label that counts, their loss is NaN, the mean over nothing. A whole step would leave such micro
        batches out, so here they take time and memory but add no loss or gradient.
        """
        if self._counts(batch):
            self._accumulate(batch)
            return
        self.session.accumulate(batch)
        self._clear_gradients()

    def _counts(self, batch: StepBatch) -> bool:
        """Whether some micro batches of a step, or of another process's part of them, have a label that counts. A whole step does."""
        is_whole, weight = self.session.config.accumulation_steps == 1, self.session.task.weight
        return is_whole or bool(self._together.largest(any(map(weight, batch, batch.sizes))))

    def _note_gradients(self) -> None:
        """Where the config accumulates, note which parameters have a gradient, and what makes memory for one like it.

        A sparse one would grow when added to.
        """
        session = self.session
        if session.config.accumulation_steps == 1 or session.world.size > 1 or session.task.takes_whole_steps:
            return
        self._gradients = [
            (p, partial(torch.empty_strided, g.size(), g.stride(), dtype=g.dtype, device=g.device))
            for p in session.model.parameters()
            if (g := p.grad) is not None and g.layout is torch.strided
        ]

    @property
    def _begins_with_all(self) -> bool:
        """Whether every trained parameter is among those that are given a gradient."""
        return len(self._gradients) == sum(p.requires_grad for p in self.session.model.parameters())

    def _begin_with_gradients(self) -> None:
        """Give the parameters that were noted gradients of zero, as they have some after an accumulating step's first micro batch.

        To add to them takes longer than to make them: 5 % of a step of two micro batches, where most parameters were an embedding's.
        """
        for parameter, make in self._gradients:
            parameter.grad = make().zero_()
        if self._gradients:
            self.device.synchronize()

    def _clear_gradients(self) -> None:
        for parameter in self.session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def _update(self) -> None:
        self.session.update()
        self.num_steps += 1

    def _clock(self, work: Callable[[], object], num_micro_steps: int = 0) -> float:
        """Seconds that `work`, a number of micro steps, takes on the device. They count as time inside training steps."""
        elapsed = self._seconds(work)
        self.reporter.trained(elapsed, num_micro_steps, tells_speed=self._tells_speed)
        return elapsed

    def _seconds(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes on the device, in the process that takes the longest, without what training does not do in it."""
        started, untimed_before_s = time.perf_counter(), self._untimed_s
        work()
        self.device.synchronize()
        return self._together.largest(time.perf_counter() - started - (self._untimed_s - untimed_before_s))

    @property
    def _untimed_s(self) -> float:
        return self._met_s + self._micro_batches.untimed_s


def _in_proportion(phases_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """The phases of a typical step, by their shares of another one. An update takes as long in any.

    The other phases are those of one micro batch. Where these differ, it may take half of what others take, or twice as much.
    """
    update_s = {name: seconds for name, seconds in phases_s.items() if name == "optimizer"}
    others_s = sum(phases_s.values()) - sum(update_s.values())
    left_s = step_s - sum(update_s.values())
    if others_s <= 0 or left_s <= 0:
        return dict(phases_s)
    return {name: seconds * left_s / others_s for name, seconds in phases_s.items()} | update_s
