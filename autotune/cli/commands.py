"""The commands: each reads its arguments, calls the package, prints, and returns an exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.cli.main import ANSWERED, INTERRUPTED, NOTHING_FEASIBLE, USAGE
from autotune.errors import AutotuneError, ConfigError
from autotune.records.outcome import Kind


def exit_code(error: AutotuneError) -> int:
    """1 when nothing was feasible, 2 for what the user can put right."""
    from autotune.tuning.answer import NothingFeasible

    return NOTHING_FEASIBLE if isinstance(error, NothingFeasible) else USAGE


def search(options: argparse.Namespace) -> int:
    """`autotune search`: the result on stdout, progress on stderr."""
    from autotune import api
    from autotune.records.result import Result
    from autotune.report import export
    from autotune.report.live import live_listener
    from autotune.tuning.answer import Interrupted

    if options.out:
        _require_writable(Path(options.out))
    result: Result | None
    code = ANSWERED
    try:
        result = api.search(
            options.model,
            device=options.device,
            objective=options.objective,
            memory_limit=options.memory_limit,
            headroom=options.headroom,
            global_batch=options.global_batch,
            budget=options.budget,
            trials=options.trials,
            fix=_fixed(options.fix),
            include=options.include,
            exclude=options.exclude,
            sampler=options.sampler,
            seed=options.seed,
            probe_timeout=options.probe_timeout,
            study=options.study,
            storage=options.storage,
            listener=live_listener(sys.stderr, quiet=options.quiet),
        )
    except Interrupted as error:
        print(f"autotune: {error}", file=sys.stderr)
        result, code = error.result, INTERRUPTED
    nothing = {"error": "interrupted before anything was measured", "exit_code": INTERRUPTED}
    document = nothing if result is None else result.to_dict()
    if options.out:  # before it is printed: where this fails, the document that says so is the only one
        _write(Path(options.out), export.document(document) + "\n")
    if options.json:
        print(export.document(document))
    elif result is not None:
        from autotune.report.text import render_result

        render_result(result, _console(), model=options.model)
    return code


def probe(options: argparse.Namespace) -> int:
    """`autotune probe`: one config, once."""
    return _run_one(options, steps=0)


def verify(options: argparse.Namespace) -> int:
    """`autotune verify`: a long run of one config."""
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} is not possible; expected at least 1")
    return _run_one(options, steps=options.steps)


def _run_one(options: argparse.Namespace, *, steps: int) -> int:
    from autotune import api
    from autotune.report import export

    config = _config(options.config)
    outcome = api.probe(
        options.model,
        config,
        device=options.device,
        memory_limit=options.memory_limit,
        global_batch=options.global_batch,
        timeout=options.timeout,
        steps=steps,
    )
    if options.json:
        print(export.document({"config": config, **outcome.to_dict()}))
    else:
        from autotune.report.outcome import render_outcome

        render_outcome(outcome, config, _console())
    if outcome.kind in (Kind.ERROR, Kind.UNSUPPORTED):
        return USAGE
    return ANSWERED if outcome.ok else NOTHING_FEASIBLE


def show(options: argparse.Namespace) -> int:
    """`autotune show`: what a study holds."""
    from autotune.report import export
    from autotune.report.study_text import render_study
    from autotune.study.reading import load_study

    study = load_study(options.study_file, study=options.study)
    if options.json:
        print(export.to_json(study))
    elif options.csv:
        sys.stdout.write(export.to_csv(study))
    else:
        render_study(study, _console(), model=study.attributes.get("model", "model.py"))
    return ANSWERED


def sweep(options: argparse.Namespace) -> int:
    """`autotune sweep`: a recorded table."""
    from autotune import api
    from autotune.report.live import summary
    from autotune.report.words import describe
    from autotune.task.source import TaskSource
    from autotune.tuning import sweep as sweeping

    def show(progress: sweeping.Progress) -> None:
        found = summary(progress.row.outcome, feasible=True)
        line = f"round {progress.round + 1}, {progress.left:4d} left: {describe(progress.row.config)}: {found}"
        print(line, file=sys.stderr, flush=True)

    table = sweeping.sweep(
        TaskSource.of(options.model),
        sweeping.SweepOptions(
            out=Path(options.out),
            device=options.device,
            memory_limit_bytes=api.memory_limit_bytes(options.memory_limit, options.device),
            global_batch=options.global_batch,
            grid={name: _choices(text) for name, text in _named(options.grid, "--grid", "amp=off,bf16").items()},
            include=tuple(options.include),
            exclude=tuple(options.exclude),
            interval=options.interval,
            max_repeats=options.max_repeats,
            max_timed_s=options.timed,
            probe_timeout_s=options.probe_timeout,
            seed=options.seed,
        ),
        (lambda progress: None) if options.quiet else show,
    )
    ran = [figure for figure in table.figures.values() if figure.samples_per_s]
    sharp = sum(figure.half_width <= options.interval for figure in ran)
    print(
        f"{table.path}: {len(table.figures)} configs, {len(table.rows)} probes; {len(ran)} ran, {sharp} of them known within "
        f"{options.interval:.1%}"
    )
    return ANSWERED


def predict(options: argparse.Namespace) -> int:
    """`autotune predict`: what fits, before anything has run."""
    from autotune import api
    from autotune.report import export
    from autotune.report.prediction import render_prediction
    from autotune.units import format_seconds

    prediction = api.predict(
        options.model,
        None if options.config is None else _config(options.config),
        gpu=options.gpu,
        device=options.device,
        memory_limit=options.memory_limit,
        headroom=options.headroom,
        global_batch=options.global_batch,
        timeout=options.timeout,
    )
    combinations = len(prediction.groups) + sum(len(group.same_memory) for group in prediction.groups)
    what = "one config" if options.config is not None else f"{combinations} combinations of techniques"
    print(
        f"predicted {what} in {format_seconds(prediction.wall_s)}, {format_seconds(prediction.trace_s)} of it tracing; "
        "nothing was trained",
        file=sys.stderr,
    )
    if options.json:
        print(export.document(prediction.to_dict()))
    else:
        render_prediction(prediction, _console())
    return ANSWERED if prediction.fits else NOTHING_FEASIBLE


def devices(options: argparse.Namespace) -> int:
    """`autotune devices`: what there is to train on."""
    from autotune.report.devices import render_devices, watch_devices

    if options.watch:
        watch_devices(sys.stdout)
    else:
        print(render_devices(as_json=options.json))
    return ANSWERED


def init(options: argparse.Namespace) -> int:
    """`autotune init`: a starting file."""
    from autotune.task.template import write_template

    write_template(Path(options.file))
    print(f"wrote {options.file}; try it: autotune search {options.file} --budget 1m")
    return ANSWERED


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "search": search,
    "probe": probe,
    "verify": verify,
    "show": show,
    "sweep": sweep,
    "predict": predict,
    "devices": devices,
    "init": init,
}


def _console() -> Any:
    import io

    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without Unicode shows `?` for what it lacks
        sys.stdout.reconfigure(errors="replace")
    return Console(file=sys.stdout, highlight=False)


def _fixed(items: list[str]) -> dict[str, Any]:
    """`--fix amp=bf16 --fix batch_size=8` as a dict."""
    return {name: _choice(text) for name, text in _named(items, "--fix", "amp=bf16").items()}


def _named(items: list[str], option: str, example: str) -> dict[str, str]:
    """Options of the form NAME=CHOICE as a dict.

    Raises:
        ConfigError: an item has no `=`.
    """
    named = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator:
            raise ConfigError(f"{option} {item} is not NAME=CHOICE; expected for example {option} {example}")
        named[name] = text
    return named


def _choices(text: str) -> tuple[Any, ...]:
    return tuple(_choice(part) for part in text.split(","))


def _choice(text: str) -> Any:
    """A choice, read as JSON where it is JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _config(text: str) -> dict[str, Any]:
    """A config dict from JSON text or a file; a search's whole JSON document counts, too.

    Raises:
        ConfigError: neither JSON nor a readable file with a JSON object.
    """
    is_json = text.lstrip().startswith("{")
    try:
        content = text if is_json else Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {text!r} is neither a JSON object nor a text file: {error}") from None
    try:
        config = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config {text!r} holds no JSON: {error}") from None
    if isinstance(config, dict) and isinstance(config.get("result"), dict):  # of `show --json`
        config = config["result"]
    if isinstance(config, dict) and isinstance(config.get("config"), dict):
        config = config["config"]
    if not isinstance(config, dict):
        raise ConfigError(
            f'--config {text!r} holds a {type(config).__name__}; expected a JSON object such as {{"batch_size": 16}}'
        )
    return config


def _require_writable(path: Path) -> None:
    """Before a search rather than after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(
            f"--out {path} cannot be written; expected a file in a folder that exists and may be written to"
        )


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}; the study keeps the result") from None


__all__ = ["COMMANDS", "exit_code"]
