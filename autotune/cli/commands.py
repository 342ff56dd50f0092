"""The commands, each by its name: it reads its arguments, calls the package, prints, and returns an exit code."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.failures import failure_document
from autotune.cli.files import SEVERAL, read_config, read_options, require_other, require_writable, write
from autotune.cli.parser import ANSWERED, EVERYTHING, INTERRUPTED, MAX_REGRESSION, NOTHING_FEASIBLE, USAGE, UsageError
from autotune.errors import ConfigError, TaskError
from autotune.records.options import (
    CommandOptions,
    ExplainOptions,
    PredictOptions,
    ProbeOptions,
    SearchOptions,
    SweepOptions,
    VerifyOptions,
)
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result, file_and_attribute

if TYPE_CHECKING:
    from autotune.records.scaling import Scaling
    from autotune.report.verification import Verification
    from autotune.study.reading import Study
    from autotune.tuning.events import Listener

MODEL_FILE = "the model file"
PAGE = "html"  # the form of a study that is a page


def search(options: argparse.Namespace) -> int:
    """`autotune search`: the result on stdout, progress on stderr."""
    from autotune.records.scaling import Scaling
    from autotune.report.answer import answer_sections
    from autotune.report.scaling import scaling_section
    from autotune.report.sections import document
    from autotune.techniques import find_techniques

    out = _out_of_search(options)
    try:
        found, code = _find(options)
    except (Exception, KeyboardInterrupt) as error:
        if out is not None:  # it may hold the answer of an earlier search
            with contextlib.suppress(ConfigError):  # what ended the search matters more
                write(out, "--out", failure_document(error) + "\n")
        raise
    nothing = {"error": "interrupted before anything was measured", "exit_code": INTERRUPTED}
    text = document(nothing if found is None else found.to_dict())
    if out is not None:  # before it is printed: where this fails, the document that says so is the only one
        write(out, "--out", text + "\n")
    if options.json:
        print(text)
    elif isinstance(found, Scaling):
        _print([scaling_section(found, find_techniques())])
    elif found is not None:
        _print(answer_sections(found, find_techniques(), model=options.model or ""))
    return code


def _out_of_search(options: argparse.Namespace) -> Path | None:
    """The file that the document is written to, which the search does not read."""
    from autotune.runners.command import files_of
    from autotune.task.model_file import find_model_file

    if not options.out:
        return None
    out = Path(options.out)
    require_writable(out, "--out")
    if options.model:
        try:
            model = find_model_file(options.model)[0]
        except TaskError:  # the search says so
            model = Path(options.model)
        require_other(out, "--out", MODEL_FILE, model)
    if options.script is not None:
        require_other(out, "--out", "a file of the command", *files_of(options.script))
    require_other(out, "--out", "the table", options.replay)
    return out


def _find(options: argparse.Namespace) -> tuple[Result | Scaling | None, int]:
    """The answer, the best so far of a search that was interrupted, or None; and the exit code."""
    from autotune import api
    from autotune.report.live import live_listener
    from autotune.trackers import tracker
    from autotune.tuning.recommend import Interrupted

    asked = read_options(options, SearchOptions if options.script is None else CommandOptions)
    on_each = SEVERAL.fullmatch(asked.get("devices", "")) is not None
    listeners = [live_listener(sys.stderr, quiet=options.quiet), *map(tracker, options.track)]
    try:
        if on_each:
            return _search_on_each(options, listeners, asked), ANSWERED
        if options.script is not None:
            found = api.search_command(options.script, listeners=listeners, began_s=options.began_s, **asked)
        else:
            where = _runner(options) or {"began_s": options.began_s, "runner": options.runner}
            found = api.search(options.model, listeners=listeners, **where, **asked)
        return found, ANSWERED
    except Interrupted as error:
        print(f"autotune: {error}", file=sys.stderr)
        return error.scaling if on_each else error.result, INTERRUPTED


def _search_on_each(options: argparse.Namespace, listeners: Sequence[Listener], asked: dict[str, Any]) -> Scaling:
    """A search for each number of devices."""
    from autotune import api

    if options.script is not None or options.replay is not None or options.runner is not None:
        raise ConfigError(
            f"--devices {asked['devices']} searches a model file on each number of devices of this machine; give one number, or a MODEL "
            "alone"
        )
    sizes = [int(number) for number in asked.pop("devices").split(",")]
    return api.search_on_each(options.model, sizes, listeners=listeners, began_s=options.began_s, **asked)


def _runner(options: argparse.Namespace) -> dict[str, Any]:
    """The runner to search with, where it is not this machine."""
    if options.replay is None:
        return {}
    from autotune.runners.replay import ReplayRunner

    return {"runner": ReplayRunner(options.replay)}


def probe(options: argparse.Namespace) -> int:
    """`autotune probe`: one config, once."""
    from autotune import api

    config = read_config(options.config)
    return _show_outcome(
        api.probe(options.model, config, on_warning=_warn, **read_options(options, ProbeOptions)), config, options
    )


def verify(options: argparse.Namespace) -> int:
    """`autotune verify`: a long run of one config, or of a study's answer, which has to be as fast as it was."""
    from autotune import api
    from autotune.report.verification import Verification
    from autotune.study.reading import load_study

    if options.against is None:
        for flag, value in (("--max-regression", options.max_regression), ("--study", options.study)):
            if value is not None:
                raise UsageError(f"{flag} {value} is for a study's answer; give the study by --against STUDY")
        config = read_config(options.config)
        asked = read_options(options, VerifyOptions)
        return _show_outcome(api.verify(options.model, config, on_warning=_warn, **asked), config, options)
    study = load_study(options.against, study=options.study)
    answer = _answer(study)
    if answer.command:
        raise ConfigError(
            f"the answer of {options.against} is a command line, whose script MODEL is not; run it: {answer.command}"
        )
    outcome, seen, elsewhere = api.verify_answer(
        options.model,
        study,
        on_warning=_warn,
        on_progress=_tell,
        **read_options(options, VerifyOptions, answer.goal.asked),
    )
    verified = Verification(
        study=study.name,
        answer=answer,
        outcome=outcome,
        seen=seen,
        elsewhere=elsewhere,
        slower=MAX_REGRESSION if options.max_regression is None else options.max_regression,
    )
    code = _show_outcome(outcome, answer.config, options, verified)
    if options.study is None and study.others:
        _warn(f"this was the answer of the study {study.name}; --study names another one")
    return code if verified.holds or not outcome.ok else NOTHING_FEASIBLE


def _answer(study: Study) -> Result:
    """A study's answer, with a note where the last search found none and this is an earlier one's."""
    answer = study.answer()
    if why := study.facts.no_answer:
        _warn(f"the answer of {study.name} is an earlier search's; the last one found none: {why}")
    return answer


def _warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show_outcome(
    outcome: Outcome, config: dict[str, Any], options: argparse.Namespace, verified: Verification | None = None
) -> int:
    from autotune.report.study import outcome_sections
    from autotune.techniques import find_techniques

    sections = [*outcome_sections(outcome, config, find_techniques())]
    data = {"config": config, **outcome.to_dict()}
    if verified is not None:
        data |= verified.to_dict()
        sections += verified.sections()
    _show(options, data, sections)
    if outcome.kind in (Kind.ERROR, Kind.UNSUPPORTED):
        return USAGE
    return ANSWERED if outcome.ok else NOTHING_FEASIBLE


def show(options: argparse.Namespace) -> int:
    """`autotune show`: the probes, the front and the answer of a study."""
    from autotune.report import formats
    from autotune.report.study import study_sections
    from autotune.study.reading import load_study

    study = load_study(options.study_file, study=options.study)
    if options.form is not None:
        sys.stdout.write(formats.render(study, options.form))
        if options.form == PAGE:
            _warn_of_no_pictures()
    else:
        _print(study_sections(study, model=study.facts.model))
    return ANSWERED


def report(options: argparse.Namespace) -> int:
    """`autotune report`: a study as a page."""
    from autotune.report import formats
    from autotune.study.reading import load_study

    study = load_study(options.study_file, study=options.study)
    page = Path(options.html or f"{study.name}.html")
    require_writable(page, "--html")
    _require_not_of(study, page, "--html")
    write(page, "--html", formats.render(study, PAGE))
    print(page)
    _warn_of_no_pictures()
    return ANSWERED


def _warn_of_no_pictures() -> None:
    from autotune.report.plots import why_no_pictures

    if reason := why_no_pictures():
        _warn(f"the page has no pictures: {reason}")


def _require_not_of(study: Study, out: Path, flag: str) -> None:
    """Raise ConfigError where an output is the study's database, the model file that it is of, or a file of its command."""
    from autotune.runners.command import files_of

    answer = study.result
    model = study.facts.model if answer is None else answer.subject.model
    require_other(out, flag, MODEL_FILE, file_and_attribute(model)[0])
    if answer is not None and answer.command:
        require_other(out, flag, "a file of the command", *files_of(answer.command))
    require_other(out, flag, "the study", study.file)


def dashboard(options: argparse.Namespace) -> int:
    """`autotune dashboard`: Optuna's own view of a study, until Ctrl-C."""
    from autotune.cli.dashboard import serve
    from autotune.study.reading import open_to_show

    serve(*open_to_show(options.study_file), options.host, options.port)
    return ANSWERED


def compare(options: argparse.Namespace) -> int:
    """`autotune compare`: the answers of several studies side by side."""
    from autotune.report.study import comparison_sections
    from autotune.study.reading import load_study

    files, names = options.study_files, options.study or [None]
    if len(names) not in (1, len(files)):
        raise UsageError(
            f"--study was given {len(names)} times for {len(files)} files; give it once for each file, in order, or once for all"
        )
    names = names * (len(files) // len(names))
    studies = [load_study(file, study=name) for file, name in zip(files, names, strict=True)]
    answers = {"answers": [_answer(study).to_dict() for study in studies]}
    return _show(options, answers, comparison_sections(studies))


def export(options: argparse.Namespace) -> int:
    """`autotune export`: the answer in other words, on stdout or in a file; what cannot be said there, on stderr."""
    from autotune.export import export
    from autotune.study.reading import load_study

    study = load_study(options.study_file, study=options.study)
    if options.out:
        _require_not_of(study, Path(options.out), "--out")
    exported = export(_answer(study), options.to, space=study.facts.space, force=options.force)
    for name, why in exported.unsaid.items():
        print(f"not exported: {name}: {why}", file=sys.stderr)
    if options.out:
        write(Path(options.out), "--out", exported.text + "\n")
    else:
        print(exported.text)
    return ANSWERED


def sweep(options: argparse.Namespace) -> int:
    """`autotune sweep`: a recorded table."""
    from autotune import api
    from autotune.report.live import summary
    from autotune.techniques import find_techniques
    from autotune.tuning.sweep import Progress
    from autotune.units import plural

    def show(progress: Progress) -> None:
        if options.quiet:
            return
        found = summary(progress.row.outcome, feasible=True)
        line = f"round {progress.round + 1}, {progress.left:4d} left: {find_techniques().describe(progress.row.config)}: {found}"
        print(line, file=sys.stderr, flush=True)

    asked = read_options(options, SweepOptions)
    interval = SweepOptions.of({name: asked[name] for name in ("out", "interval") if name in asked}).interval
    table = api.sweep(options.model, on_row=show, **asked)
    ran = [figure for figure in table.figures.values() if figure.samples_per_s]
    sharp = sum(figure.half_width <= interval for figure in ran)
    print(
        f"{table.path}: {plural(len(table.figures), 'config')}, {plural(len(table.rows), 'probe')}; {len(ran)} ran, "
        f"{sharp} of them known to within {interval:.1%}"
    )
    return ANSWERED


def predict(options: argparse.Namespace) -> int:
    """`autotune predict`: the largest batches that fit, before anything has run."""
    from autotune import api
    from autotune.report.capacity import first_words, prediction_sections
    from autotune.techniques import find_techniques
    from autotune.units import format_seconds, plural

    prediction = api.predict(
        options.model,
        None if options.config is None else read_config(options.config),
        on_first=lambda first: print(first_words(first), file=sys.stderr, flush=True),
        on_warning=_warn,
        **read_options(options, PredictOptions),
    )
    combinations = len(prediction.groups) + sum(len(group.same_memory) for group in prediction.groups)
    what = "one config" if options.config is not None else f"{plural(combinations, 'combination')} of techniques"
    print(
        f"predicted {what} in {format_seconds(prediction.wall_s)}, {format_seconds(prediction.trace_s)} of it tracing; "
        "nothing was trained",
        file=sys.stderr,
    )
    _show(options, prediction.to_dict(), prediction_sections(prediction, find_techniques()))
    return ANSWERED if prediction.fits else NOTHING_FEASIBLE


def explain(options: argparse.Namespace) -> int:
    """`autotune explain`: where memory and time go, and what to do about it."""
    from autotune import api
    from autotune.report.explanation import explanation_sections
    from autotune.report.plots import draw, require_form
    from autotune.techniques import find_techniques
    from autotune.units import format_seconds

    picture = None if options.picture is None else Path(options.picture)
    if picture is not None:
        require_form(picture)
        require_writable(picture, "--picture")
    explanation = api.explain(
        options.model,
        None if options.config is None else read_config(options.config),
        on_warning=_warn,
        **read_options(options, ExplainOptions),
    )
    print(
        f"explained in {format_seconds(explanation.wall_s)}, {format_seconds(explanation.trace_s)} of it tracing",
        file=sys.stderr,
    )
    _show(options, explanation.to_dict(), explanation_sections(explanation, find_techniques()))
    if picture is not None and explanation.memory is None:
        print("autotune: no picture: the memory could not be traced", file=sys.stderr)
    elif picture is not None and explanation.memory is not None:
        draw(explanation, explanation.memory, find_techniques(), picture)
    return ANSWERED


def devices(options: argparse.Namespace) -> int:
    """`autotune devices`: the devices to train on."""
    from autotune.report.devices import render_devices, watch_devices

    if options.watch:
        watch_devices(sys.stdout)
    else:
        print(render_devices(as_json=options.json))
    return ANSWERED


def priors(options: argparse.Namespace) -> int:
    """`autotune priors`: what earlier studies taught, or fewer of them."""
    from autotune.report.priors import plain, sections
    from autotune.study.place import DEFAULT_FOLDER
    from autotune.study.priors import PriorStore

    store = PriorStore(Path(options.folder or DEFAULT_FOLDER), _warn)
    if options.forget is not None:
        for name in store.forget(None if options.forget == EVERYTHING else options.forget):
            print(f"forgot {name}", file=sys.stderr)
    studies = store.studies()
    return _show(options, plain(studies, store.files), sections(studies, store.files))


def doctor(options: argparse.Namespace) -> int:
    """`autotune doctor`: what a search assumes, proven on this machine."""
    from autotune import doctor
    from autotune.doctor.verdicts import State

    def tell(name: str) -> None:
        print(f"checking {name}", file=sys.stderr, flush=True)

    lines = list(doctor.examine(options.device, tell, options.devices))
    _show(options, doctor.plain(lines), doctor.sections(lines))
    code = NOTHING_FEASIBLE if any(line.state is State.DIFFERS for line in lines) else ANSWERED
    sys.stdout.flush()
    if multiprocessing.active_children():  # one is stuck in the driver, and Python would wait for it before it ends
        os._exit(code)
    return code


def init(options: argparse.Namespace) -> int:
    """`autotune init`: a starting file."""
    from autotune.task.template import write_template

    write_template(Path(options.file))
    print(f"wrote {options.file}; try it: autotune search {options.file} --budget 1m")
    return ANSWERED


def completion(options: argparse.Namespace) -> int:
    """`autotune completion`: what a shell evaluates to complete `autotune`'s commands, options and choices."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["autotune"], shell=options.shell))
    return ANSWERED


def _show(options: argparse.Namespace, data: dict[str, Any], sections: Iterable[Any]) -> int:
    """Print what was found: as one JSON document with `--json`, else as text."""
    from autotune.report.sections import document

    if options.json:
        print(document(data))
    else:
        _print(sections)
    return ANSWERED


def _print(sections: Iterable[Any]) -> None:
    from autotune.report.terminal import render, stdout_console

    render(sections, stdout_console())
