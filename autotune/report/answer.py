"""An answer as sections: the config to run, its gain with the interval, the reasons, and how to run it as it was measured.

The lines that show how to run it are text to paste. In their functions `model` names the task as `autotune.prepare` and the command
line take it (empty for a task built in Python), and `asked` is `Result.goal.asked`. Defaults are left out, so that lines stay short.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.devices.linux import DISTURBED
from autotune.records.check import Check
from autotune.records.config import Choice
from autotune.records.measured import Dropped, Evaluation, Measured
from autotune.records.objective import OBJECTIVES
from autotune.records.options import machines_in, torchrun_of, words
from autotune.records.result import Compiling, Cost, DeviceUse, Effect, Reasons, Result
from autotune.report.figures import (
    ENERGY,
    NOISY,
    NOISY_SPREAD,
    THROUGHPUT,
    TRAINING,
    Said,
    bound,
    counts,
    gain_in_table,
    interval,
    is_known,
    limit_words,
    measured_joules,
    measured_rate,
    rate,
    role_of,
    said_of,
    spread,
    times,
)
from autotune.report.scaling import one_device_section
from autotune.report.sections import Block, Cell, Code, Paragraph, Section, Span, Tone, table, warnings_section
from autotune.report.terminal import as_text
from autotune.study.place import shown_of
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.frameworks import FRAMEWORKS
from autotune.units import format_bytes, format_count, format_per_s, format_seconds, plural

VERIFY_STEPS = 100  # `--steps` of the command that is offered
SHOWN_S = 0.05  # shorter parts of the wall time are not mentioned
SLOWER = 0.995  # a change with a smaller ratio of speeds is shown below 1.00x
AS_A_WHOLE = (
    "The answer was chosen as a whole: a change below 1x in these pairs may gain beside the others, or save memory."
)
OF_PROBE = "the speed is its probe's, in the search: other work disturbed each run here"
ROLES = {"answer": Tone.BEST, "best so far": Tone.BEST, "baseline": Tone.BASELINE, "dropped": Tone.WARNING}


def answer_sections(
    result: Result, techniques: Techniques, *, model: str = "model.py", in_study: bool = False
) -> Iterator[Section]:
    """All sections of an answer.

    Args:
        model: the model file, as the user named it, for the lines that show how to run the answer; empty for a task
            built in Python.
        in_study: whether the study and its front stand before the answer.
    """
    goal = result.goal
    about = f"on {result.subject.device}: {limit_words(goal.objective, goal.memory_limit_bytes, goal.headroom)}"
    verdict = [Paragraph(_verdict(result, techniques))]
    if not result.play_off.confirmed and not result.undecided:
        why = "Not confirmed: no round of the play-off was completed, so each figure is from one process."
        verdict.append(Paragraph(Span(why, Tone.WARNING)))
    yield Section("Answer", tuple(verdict)) if in_study else Section(result.study, tuple(verdict), about)
    title = "Best so far, not recommended" if result.doubt else "Recommended config"
    yield Section(title, (as_code(result.config, techniques, "config = "),), "everything not named is off")
    yield from _play_off(result, techniques)
    if result.one_device is not None:
        yield one_device_section(result, result.one_device, _answer(result), techniques)
    yield from _compiling(result.compiling, result.goal.train_samples)
    if result.front and not in_study:
        yield front_section(result.front, result, result.baseline, techniques)
    if result.rankings:
        yield _rankings(result, techniques)
    if result.evaluation is not None:
        yield _evaluation(result.evaluation)
    yield from _reasons(result.reasons, techniques)
    yield from _checks(result.checks, techniques)
    yield Section("The search", (Paragraph(_cost(result.cost, result.storage)),))
    if result.warnings:
        yield warnings_section(result.warnings)
    own_risk = "at your own risk" if result.doubt else ""
    if result.command:
        yield Section("Run it", (Code("", tail=result.command),), own_risk)
        return
    lines = python_lines(model, goal.asked, result.subject.num_processes, result.subject.made_by)
    yield Section("Run it", lines, own_risk)
    if not model and (command := export_command(result)):
        yield Section("In the framework's own words", (Code("", tail=command),))
    if command := verify_command(result.config, techniques, model, goal.asked):
        yield Section("", (Code("", tail=command),))
    elif machines_in(str(goal.asked.get("devices", ""))):
        why = "`autotune verify` runs on one machine, so no command tries an answer for several."
        yield Section("", (Paragraph(Span(why, Tone.NOTE)),))


def in_short(result: Result) -> str:
    """The answer in two lines: `faster: 1.87x the baseline (95% interval 1.81x to 1.93x), with 0.81x its memory`, and the config."""
    found, gain = said_of(result), ""
    if result.baseline is not None and found.gain:
        sure = f" ({found.sure})" if found.sure else ""
        of = "" if found.of == THROUGHPUT else f"'s {found.of}"
        gain = f": {found.gain} the baseline{of}{sure}, with {_beside(result, found)}"
    figures = f"{rate(result.samples_per_s)} samples/s, {format_bytes(result.peak_bytes)}{_joules(result)}"
    return f"{found.verdict}{gain}\n{find_techniques().describe(result.config)}: {figures}; summary() tells the rest"


def page(result: Result, width: int) -> str:
    """The whole answer, as `autotune search` prints it."""
    return as_text(answer_sections(result, find_techniques(), model=result.subject.model), width)


def as_code(config: Mapping[str, Choice], techniques: Techniques, head: str = "") -> Code:
    """`head` and the config's essentials as a dict literal of Python."""
    literals = {
        name: json.dumps(choice) if isinstance(choice, str) else repr(choice)
        for name, choice in _essentials(config, techniques).items()
    }
    return Code(f"{head}{{", tuple(f'"{name}": {literal}' for name, literal in literals.items()), "}")


def as_json(config: Mapping[str, Choice], techniques: Techniques) -> str:
    """The config's essentials as one line of JSON, for `--config`."""
    return json.dumps(_essentials(config, techniques))


def _essentials(config: Mapping[str, Choice], techniques: Techniques) -> dict[str, Choice]:
    """The part of a config that `prepare` needs to build it again: the batch, and every technique that is not off."""
    return {name: choice for name, choice in config.items() if not techniques.is_off(name, choice)}


def python_lines(
    model: str, asked: Mapping[str, str | int], num_processes: int = 1, made_by: str = ""
) -> tuple[Code, ...]:
    """A training loop that uses `config`; for several processes, also how to start them.

    Args:
        made_by: the call that makes a task built in Python of what an integration tuned; without one, `task` is said to be the user's.
    """
    task = json.dumps(model, ensure_ascii=False) if model else "task"
    given = dict(asked)
    where, command = torchrun_of(str(given.get("devices", "")), num_processes)
    started = [f"# {command} train.py, where this is train.py:"]
    if where:
        started = [f"# {where}, where this is train.py:", f"# {command} train.py"]
    if str(given.get("devices", "")).startswith("cpu:"):
        given["device"] = "cpu"
    options = [f"{name}={json.dumps(given[name])}" for name in ("device", "global_batch") if name in given]
    call = Code("session = autotune.prepare(", (task, "config", *options), ")")
    return (
        *(map(Code, started) if num_processes > 1 else ()),
        *_task_lines(model, made_by),
        call,
        Code("for batch in session.loader:"),
        Code("    loss = session.step(batch)"),
    )


def _task_lines(model: str, made_by: str) -> Iterator[Code]:
    """What the lines import, and for a task built in Python what `task` is."""
    if made_by and not model:
        yield Code(f"import {_integration_of(made_by)}")
        yield Code("# with what was tuned, as it was before training:")
        yield Code(f"task = {made_by}")
        return
    yield Code("import autotune")
    if not model:
        yield Code("# task is the autotune.Task that was searched")


def export_command(result: Result) -> str:
    """The `autotune export` that says the answer as the framework does whose trainer was tuned; empty for any other task."""
    framework = _integration_of(result.subject.made_by).rpartition(".")[2]
    if framework not in FRAMEWORKS:
        return ""
    force = ["--force"] if result.doubt else []
    return shlex.join(
        ["autotune", "export", shown_of(result.storage), "--study", result.study, "--to", framework, *force]
    )


def _integration_of(made_by: str) -> str:
    """The module whose call makes a task."""
    return made_by.partition("(")[0].rpartition(".")[0]


def verify_command(
    config: Mapping[str, Choice], techniques: Techniques, model: str, asked: Mapping[str, str | int]
) -> str:
    """The `autotune verify` of a config, quoted for a shell; empty where none runs it."""
    if not _is_verified(model, asked):
        return ""
    command = ["autotune", "verify", model, "--config", as_json(config, techniques), "--steps", str(VERIFY_STEPS)]
    return shlex.join([*command, *words(asked)])


def _is_verified(model: str, asked: Mapping[str, str | int]) -> bool:
    """Whether `autotune verify` can run the answer: it takes a model file, and one machine."""
    return bool(model) and machines_in(str(asked.get("devices", ""))) is None


def front_section(
    front: Iterable[Measured], result: Result | None, baseline: Measured | None, techniques: Techniques
) -> Section:
    """The front by increasing memory, with the answer and the baseline marked. The answer's speed-up is the play-off's."""

    def speed(measured: Measured) -> float | None:
        if result is not None and result.speedup is not None and measured.config == result.config:
            return result.speedup
        return measured.samples_per_s / baseline.samples_per_s if baseline else None

    def role(measured: Measured) -> Span:
        if result is not None and measured.config == result.config:
            return Span(f"  {role_of(result)}", Tone.BEST)
        is_baseline = baseline is not None and measured.config == baseline.config
        return Span("  baseline" if is_baseline else "", Tone.BASELINE)

    front = list(front)
    has_energy = all(m.joules_per_sample is not None for m in front)
    rows: list[tuple[Cell, ...]] = [
        (
            format_bytes(m.peak_bytes),
            measured_rate(m),
            times(speed(m)),
            *([measured_joules(m)] if has_energy else []),
            (techniques.describe(m.config), role(m)),
        )
        for m in front
    ]
    shown = table((">peak", ">samples/s", ">speed", *([">J/sample"] if has_energy else []), "config"), rows)
    all_axes = "all three" if has_energy else "both"
    only = "no other config is faster or takes less memory" + (" or energy" if has_energy else "")
    note = only if len(front) == 1 else f"no config beats these in {all_axes}"
    if result is not None and all(m.config != result.config for m in front):
        note = "by each config's own figures; the answer is not among them but as good within the noise"
    return Section(f"Memory/throughput{'/energy' if has_energy else ''} front", (shown,), note)


def _verdict(result: Result, techniques: Techniques) -> Span:
    """The verdict in a sentence; `figures.py` decides what may be said of the gain."""
    open_question = f" Not sure: {result.undecided}." if result.undecided else ""
    found = said_of(result)
    verdict = found.verdict[0].upper() + found.verdict[1:]
    if result.baseline is None or result.speedup is None:
        return Span(f"{verdict}, so the speed-up is unknown. The warnings say why.{open_question}", Tone.BEST)
    if result.config == result.baseline.config:
        return Span(f"{_kept(result)}{_rival(result, techniques)}", Tone.STRONG)
    sure = f" ({found.sure})" if found.sure else ""
    tone = {"faster": Tone.BEST, "thriftier": Tone.BEST, "slower": Tone.WARNING, "hungrier": Tone.WARNING}
    gain = f": {found.gain} the baseline's {found.of}{sure}, with {_beside(result, found)}" if found.gain else ""
    return Span(f"{verdict}{gain}.{open_question}", tone.get(result.verdict, Tone.STRONG))


def _beside(result: Result, found: Said) -> str:
    """What the gain comes with: memory, and of speed and energy what it is not a gain of, as far as that is known."""
    assert result.baseline is not None
    parts = [f"{times(result.peak_bytes / result.baseline.peak_bytes)} its memory"]
    if found.of != THROUGHPUT:
        parts.append(f"{times(result.speedup)} its throughput")
    if found.of != ENERGY and result.energy.energy_ratio is not None:
        parts.append(f"{times(result.energy.energy_ratio)} its energy a sample")
    return " and ".join(parts)


def _joules(result: Result) -> str:
    """`, 0.52 J a sample`; empty where that is not known."""
    joules = result.energy.joules_per_sample
    return "" if joules is None else f", {rate(joules)} J a sample"


def _kept(result: Result) -> str:
    if result.verdict == "undecided":
        return f"Undecided: the evidence is too thin to say that nothing beats what you have; {result.undecided}."
    if result.cost.probes == 1:
        return "Keep what you have: nothing else was tried; `autotune show` lists what is not searched, and why."
    return "Keep what you have: nothing beat the baseline beyond the noise."


def _rival(result: Result, techniques: Techniques) -> str:
    """A sentence on the best config but the baseline in the play-off; empty where none played."""
    rival = result.play_off.rival
    if rival is None:
        return ""
    ratio, (low, high), of = rival.speedup, rival.speedup_ci, THROUGHPUT
    searched_for_energy = OBJECTIVES[result.goal.objective].is_thrift
    if searched_for_energy and rival.energy_ratio is not None and rival.energy_ratio_ci is not None:
        ratio, (low, high), of = rival.energy_ratio, rival.energy_ratio_ci, ENERGY
    if rival.training_speedup is not None:
        ratio, low, high = rival.training_speedup
        of = TRAINING
    if not is_known(low, high):
        found = f"{times(ratio)} its {of}, from one round, so its interval is unknown"
    elif spread(ratio, low, high) == NOISY:
        found = "too noisy to tell"
    elif end := bound(low, high):
        found = f"{end} its {of}"
    else:
        found = f"{times(ratio)} its {of}, 95% interval {interval(low, high)}"
    if OBJECTIVES[result.goal.objective].memory_weight and result.baseline is not None:
        found += f", with {times(rival.peak_bytes / result.baseline.peak_bytes)} its memory"
    return f" The best of the others, {techniques.describe(rival.config)}: {found}."


def _play_off(result: Result, techniques: Techniques) -> Iterator[Section]:
    """The answer beside the baseline and the other finalists, also those that the play-off dropped.

    Where the play-off came to no answer, those who played stand apart: the answer and the baseline are told by their probes in the search,
    as far as nothing disturbed those.
    """
    base, confirmed = result.baseline, result.play_off.confirmed
    answer = (role_of(result), _answer(result))
    baseline = [("baseline", base)] if base and base.config != result.config else []
    known = (result.config, base and base.config) if confirmed else ()
    others = [measured for measured in result.play_off.finalists if measured.config not in known]
    ran = sorted((m for m in others if not isinstance(m, Dropped)), key=lambda m: -m.samples_per_s)
    played = [
        *((f"{place}.", other) for place, other in enumerate(ran, start=2 if confirmed else 1)),
        *(("dropped", other) for other in others if isinstance(other, Dropped)),
    ]
    limit_bytes = result.goal.memory_limit_bytes
    share = result.peak_bytes / limit_bytes if limit_bytes else 0.0
    allowed = format_bytes(limit_bytes * (1 - result.goal.headroom))
    whose = "Its" if result.doubt else "The answer's"
    said = [_later(result)] if result.play_off.later_std and result.speedup_ci else []
    said += [f"{whose} peak is {share:.0%} of the limit; up to {allowed} was allowed.", *_energy_and_money(result)]
    notes = [Paragraph(Span(text, Tone.NOTE)) for text in said]
    rounds = "fresh processes in turn; 95% intervals"
    if confirmed:
        yield Section("Play-off", (*_compared([answer, *played, *baseline], techniques), *notes), rounds)
        return
    yield Section(
        "Measured", (*_compared([answer, *baseline], techniques), *notes), "not confirmed by a play-off; 95% intervals"
    )
    if played:
        yield Section("Play-off without an answer", _compared(played, techniques), rounds)


def _compared(shown: Sequence[tuple[str, Measured]], techniques: Techniques) -> tuple[Block, ...]:
    """A row for each of some configs, with its role; what is said of a row stands behind its config."""
    has_energy = any(measured.joules_per_sample is not None for _, measured in shown)

    def figures(found: Measured) -> tuple[str, ...]:
        told = (
            measured_rate(found),
            format_seconds(found.step_s),
            format_bytes(found.peak_bytes),
            measured_joules(found),
        )
        return (told if found.num_processes else ("-",) * 4)[: 4 if has_energy else 3]

    rows: list[tuple[Cell, ...]] = [
        (
            Span(role, ROLES.get(role, Tone.NOTE)),
            *figures(measured),
            str(measured.num_processes),
            (
                techniques.describe(measured.config),
                Span(f"  {OF_PROBE}" if measured.by_probe else "", Tone.NOTE),
                Span(f"  {measured.dropped}" if isinstance(measured, Dropped) else "", Tone.WARNING),
            ),
        )
        for role, measured in shown
    ]
    titles = ("", ">samples/s", ">step", ">peak", *([">J/sample"] if has_energy else []), ">runs", "config")
    noisy = any(measured_rate(measured).endswith(NOISY) for _, measured in shown if measured.num_processes)
    wide = [Paragraph(Span(f"{NOISY}: the interval is wider than ±{NOISY_SPREAD:.0%}.", Tone.NOTE))] if noisy else []
    return table(titles, rows), *wide


def _later(result: Result) -> str:
    """How the speed-up's interval allows for a run on another day."""
    number = result.play_off.num_rechecks
    model, until = shlex.quote(result.subject.model), ""
    if _is_verified(result.subject.model, result.goal.asked):
        until = f" until `autotune verify {model} --against STUDY --steps {VERIFY_STEPS}` has measured it here"
    known = f"as {plural(number, 'later run')} of answers on this machine did" if number else f"which is assumed{until}"
    return f"The speed-up's interval allows for a later run that differs by {result.play_off.later_std:.1%}, {known}."


def _energy_and_money(result: Result) -> Iterator[str]:
    """Why no energy is told, and what a million samples cost, where that was asked for."""
    if result.energy.no_energy:
        yield f"Its energy is not told: {result.energy.no_energy}."
    if (money := result.money) is not None and (price := result.goal.price) is not None:
        before = money.baseline_per_million_samples
        is_kept = result.baseline is None or result.config == result.baseline.config
        instead = f" instead of {price.words(before)}" if before and not is_kept else ""
        several = f" for each of {money.num_devices} devices" if money.num_devices > 1 else ""
        yield f"A million samples cost {price.words(money.per_million_samples)}{instead}, at {price}{several}."


def _compiling(compiling: Compiling, train_samples: float | None) -> Iterator[Section]:
    """What compiling costs, when that is won back, and whether it counted in the choice."""
    told = []
    if compiling.compile_cold_s:
        won = "what was measured does not show that this is won back"
        if compiling.break_even_steps is not None and compiling.break_even_s is not None:
            steps = plural(compiling.break_even_steps, "optimizer step")
            won = f"that is won back after {steps}, {compiling.break_even_s / 3600:.2g} hours into the training"
        told.append(
            f"The answer takes {format_seconds(compiling.compile_cold_s)} to compile at first; against the fastest config that "
            f"compiles nothing, {won}."
        )
    if train_samples:
        told.append(f"Chosen by the time for {train_samples:,.0f} samples, compiling included.")
    if told:
        yield Section("Compiling", (Paragraph(" ".join(told)),))


def _rankings(result: Result, techniques: Techniques) -> Section:
    """A row for each choice of what is trained, with its best config; the answer's own comes first. None is marked as the best."""
    rows: list[tuple[Cell, ...]] = []
    evaluates = any(ranking.evaluation for ranking in result.rankings)
    for ranking in result.rankings:
        sizes = [format_count(n) if n is not None else "-" for n in (ranking.num_parameters, ranking.num_trainable)]
        figures, told = ["-", "-", "-"], Span(f"  {ranking.failure}", Tone.WARNING)
        if ranking.config is not None:
            figures = [
                rate(ranking.samples_per_s or 0.0),
                format_bytes(ranking.peak_bytes or 0),
                gain_in_table(ranking, ranking, result.goal.objective),
            ]
            told = Span("" if ranking.confirmed else "  not confirmed", Tone.WARNING)
        trained = ", ".join(techniques.label(name, choice) for name, choice in ranking.choice.items())
        rest = {name: choice for name, choice in (ranking.config or {}).items() if name not in ranking.choice}
        if evaluates:
            size = ranking.evaluation and ranking.evaluation.eval_batch_size
            figures.append("-" if size is None else str(size))
        rows.append((*sizes, *figures, (f"{trained}{f': {techniques.describe(rest)}' if rest else ''}", told)))
    measured = (">samples/s", ">peak", "gain", *([">eval batch"] if evaluates else []))
    shown = table((">params", ">trained", *measured, "what is trained: its best config"), rows)
    said = (
        "These train different things, and their accuracy was not compared: none is the winner. Each gain is over the "
        "baseline of the same training. The answer above is the first."
    )
    note = "one for each thing that may be trained; 95% intervals"
    return Section("Rankings", (shown, Paragraph(Span(said, Tone.NOTE))), note)


def _evaluation(evaluation: Evaluation) -> Section:
    """The batch size for evaluation, and what was tried for it."""
    rows = []
    for one in evaluation.tried:
        speed, low, high = one.samples_per_s or 0.0, *(one.samples_per_s_ci or (0.0, 0.0))
        told = (
            one.cause if one.samples_per_s is None else "" if one.fits else "more than the memory limit less headroom"
        )
        best = one.eval_batch_size == evaluation.eval_batch_size
        rows.append(
            (
                Span(str(one.eval_batch_size), Tone.BEST if best else Tone.PLAIN),
                f"{rate(speed)} {spread(speed, low, high)}".rstrip() if speed else Span(one.kind, Tone.BAD),
                format_bytes(one.peak_bytes) if one.peak_bytes else "-",
                Span(told, Tone.WARNING),
            )
        )
    blocks: list[Block] = [table((">eval batch", ">samples/s", ">peak", ""), rows)] if rows else []
    if evaluation.unfinished:
        blocks.append(Paragraph(Span(f"Not finished: {evaluation.unfinished}.", Tone.WARNING)))
    if evaluation.eval_batch_size is not None:
        size = evaluation.eval_batch_size
        blocks.append(Code(f"session.evaluate(dataset, batch_size={size})"))
    return Section(
        "Evaluation", tuple(blocks), "forward passes with the answer's techniques, beside the optimizer's state"
    )


def _answer(result: Result) -> Measured:
    """The answer as a `Measured`. What a result does not tell of it comes from another record of the same processes, where there is one."""
    played = result.play_off.finalists if result.play_off.confirmed else ()
    records: Sequence[Measured | None] = (result.baseline, *played)
    known = next((record for record in records if record is not None and record.config == result.config), None)
    samples_per_process = int(result.config["batch_size"]) * int(result.config["accumulation_steps"])
    return Measured(
        config=result.config,
        samples_per_s=result.samples_per_s,
        samples_per_s_ci=result.samples_per_s_ci,
        peak_bytes=result.peak_bytes,
        step_s=known.step_s if known else samples_per_process * result.subject.num_processes / result.samples_per_s,
        num_processes=known.num_processes if known else 1,
        joules_per_sample=result.energy.joules_per_sample,
        joules_per_sample_ci=result.energy.joules_per_sample_ci,
        by_probe=known is not None and known.by_probe,
    )


def _reasons(reasons: Reasons, techniques: Techniques) -> Iterator[Section]:
    """The effect of each technique, and the limit of the speed."""
    if reasons.effects and not any(effect.num_pairs for effect in reasons.effects):
        unseen = ", ".join(_change(effect, techniques) for effect in reasons.effects)
        yield Section("Effect of each change", (Paragraph(f"No change was measured alone: {unseen}."),))
    elif reasons.effects:
        rows = (
            (
                _speed(effect),
                _ratio(effect.memory_ratio, more_is_better=False),
                str(effect.num_pairs),
                (_change(effect, techniques), Span(_doubt(effect), Tone.NOTE)),
            )
            for effect in reasons.effects
        )
        changes = table((">speed", ">memory", ">pairs", "change"), rows)
        slower = any(effect.speed_ratio is not None and effect.speed_ratio < SLOWER for effect in reasons.effects)
        told = [Paragraph(Span(AS_A_WHOLE, Tone.NOTE))] if slower else []
        yield Section("Effect of each change", (changes, *told), "from configs that differ in it alone; 95% intervals")
    if reasons.limit:
        yield Section("Limit of the speed now", (Paragraph(reasons.limit), *_use(reasons)))


def _checks(checks: Sequence[Check], techniques: Techniques) -> Iterator[Section]:
    """The comparison with plain fp32."""
    if checks:
        checked = table(
            (">gradient", ">cosine", ">loss", ">buffers", ""), (_check(check, techniques) for check in checks)
        )
        why = [Paragraph(f"{_checked(check, techniques)}: {check.reason}") for check in checks if check.reason]
        yield Section("Checked on your model", (checked, *why), "a small step against plain fp32, relative errors")


def _change(effect: Effect, techniques: Techniques) -> str:
    """`fp32 -> bf16`."""
    return f"{techniques.label(effect.technique, effect.baseline_choice)} -> {techniques.label(effect.technique, effect.choice)}"


def _speed(effect: Effect) -> Span:
    """A ratio with its interval; in colour where the interval is all on one side."""
    if effect.speed_ratio is None or effect.speed_ratio_ci is None or not is_known(*effect.speed_ratio_ci):
        return _ratio(effect.speed_ratio, more_is_better=True)
    low, high = effect.speed_ratio_ci
    tone = Tone.GOOD if low > 1 else Tone.WARNING if high < 1 else Tone.PLAIN
    sure = NOISY if spread(effect.speed_ratio, low, high) == NOISY else f"({interval(low, high)})"
    return Span(f"{times(effect.speed_ratio)} {sure}", tone)


def _doubt(effect: Effect) -> str:
    return "  not isolated" if not effect.num_pairs else "  disturbed by other work" if effect.disturbed else ""


def _use(reasons: Reasons) -> Iterator[Paragraph]:
    """How near the device's limits the answer runs, and its throughput in tokens."""
    if use := reasons.use:
        flops, moved = format_per_s(use.flops_per_s, "FLOP"), format_per_s(use.bytes_per_s, "B")
        yield Paragraph(
            f"{flops} in {use.arithmetic}, {_portion(use.flops_share)} what this device was measured to reach for such work; "
            f"operators move {moved}, {_portion(use.bandwidth_share)} its memory's bandwidth."
        )
    if use and max(use.flops_share, use.bandwidth_share) > 1:
        yield Paragraph(Span(f"More than 100%: {_beyond(use)}.", Tone.NOTE))
    if reasons.tokens_per_s:
        yield Paragraph(f"{reasons.tokens_per_s:,.0f} tokens/s, as loss_weight counts.")


def _portion(share: float) -> str:
    """`34% of`. Where a share is far beyond one, the measurement of the device went wrong, and by how much says nothing."""
    return f"{share:.0%} of" if share <= 2 else "more than twice"


def _beyond(use: DeviceUse) -> str:
    """Why a config may do more than the device was measured to reach."""
    if use.contention > DISTURBED:
        return f"others held the device for {use.contention:.0%} of the time when it was measured; the next search measures it again"
    if use.flops_share > 1:
        return (
            "the device was slower when it was measured, or its kernels suit this model better than what was measured"
        )
    return "caches serve a part, or the device was slower when it was measured"


def _checked(check: Check, techniques: Techniques) -> str:
    return "whole config" if check.technique == "config" else techniques.label(check.technique, check.choice)


def _check(check: Check, techniques: Techniques) -> tuple[Cell, ...]:
    bound = "exact" if check.exact else "reduced precision"
    because = f"because of {', '.join(check.cause)}" if check.cause else f"as {bound}"
    on = f" on {plural(check.num_samples, 'sample')}" if check.num_samples else ""
    names = "" if check.names_equal else ", parameter names changed"
    failed = Span("FAILED", Tone.FAILED) if check.passed is False else Span("undecided", Tone.WARNING)
    passed = Span("passed", Tone.GOOD) if check.passed else failed
    noise = Span(f"; noise {check.noise:.0e}" if check.noise else "", Tone.NOTE)
    return (
        f"{check.gradient_error:.1e}",
        f"{check.gradient_cosine:.6f}",
        f"{check.loss_error:.1e}",
        f"{check.buffer_error:.1e}",
        (passed, f" {because}, {_checked(check, techniques)}{on}{names}", noise),
    )


def _ratio(ratio: float | None, *, more_is_better: bool) -> Span:
    if ratio is None:
        return Span("-", Tone.NOTE)
    gain = ratio if more_is_better else 1 / ratio
    return Span(times(ratio), Tone.GOOD if gain >= 1.01 else Tone.WARNING if gain <= 0.99 else Tone.PLAIN)


def _cost(cost: Cost, storage: str) -> str:
    first = "" if not cost.first_probe_s else f" The first probe began after {format_seconds(cost.first_probe_s)}."
    split = ", ".join(
        f"{name} {format_seconds(seconds)}" for name, seconds in cost.split_s.items() if seconds >= SHOWN_S
    )
    return (
        f"{plural(cost.probes, 'probe')} ({counts(cost.outcomes)}) in the study, {format_seconds(cost.train_s)} in training steps; "
        f"this search took {format_seconds(cost.wall_s)}{f' ({split})' if split else ''}.{first} "
        f"Kept in {shown_of(storage)}."
    )
