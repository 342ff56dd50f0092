"""Options: spelled once, read from text and from Python, refused with the value and what was expected."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest

from autotune import api
from autotune.cli.parser import UsageError, build_parser, options_given
from autotune.errors import ConfigError
from autotune.records import option_kinds as kinds
from autotune.records.options import (
    ExplainOptions,
    PredictOptions,
    ProbeOptions,
    RunOptions,
    SearchOptions,
    SweepOptions,
    VerifyOptions,
    table,
    words,
)

GIB = 2**30
COMMANDS: dict[str, type[RunOptions]] = {
    "search": SearchOptions,
    "probe": ProbeOptions,
    "verify": VerifyOptions,
    "predict": PredictOptions,
    "explain": ExplainOptions,
    "sweep": SweepOptions,
}
NEEDED = {
    "probe": ["--config", "{}"],
    "verify": ["--config", "{}", "--steps", "100"],
    "sweep": ["--out", "table.csv"],
}


def of(**options: Any) -> SearchOptions:
    return SearchOptions.of(options, total_bytes=lambda device: 10 * GIB)


def test_text_and_python_values_mean_the_same() -> None:
    written = of(budget="2m", headroom="10%", memory_limit="12GiB", trials="3", fix=["amp=bf16", "batch_size=8"])
    assert written == of(
        budget=120, headroom=0.1, memory_limit=12 * GIB, trials=3, fix={"amp": "bf16", "batch_size": 8}
    )
    assert (written.budget_s, written.num_trials, written.memory_limit_bytes) == (120.0, 3, 12 * GIB)


def test_a_percentage_is_of_the_memory_of_the_device() -> None:
    asked = []
    options = SearchOptions.of(
        {"memory_limit": "80%", "device": "cuda:1"}, total_bytes=lambda device: asked.append(device) or 10 * GIB
    )
    assert (options.memory_limit_bytes, asked) == (8 * GIB, ["cuda:1"])


def test_one_name_is_a_list_of_one_name() -> None:
    assert of(include="amp").include == of(include=["amp"]).include == ("amp",)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("objective", "speed", "objective: 'speed' is not known; expected one of throughput, memory, balanced"),
        ("budget", "soon", "budget: 'soon' is not a duration; expected more than 0 seconds, such as 90s"),
        ("budget", 0, "budget: 0 is not possible; expected more than 0 seconds"),
        ("budget", True, "budget: True is not possible; expected more than 0 seconds"),
        ("probe_timeout", -1.0, "probe_timeout: -1.0 is not possible; expected more than 0 seconds"),
        ("headroom", 1, "headroom: 1 is not possible; expected a share from 0% to below 100%"),
        ("headroom", "200%", "headroom: '200%' is not a share; expected a value such as 5%"),
        (
            "memory_limit",
            "lots",
            "memory_limit: 'lots' is not a memory size; expected more than 0 bytes, such as 12GiB",
        ),
        ("memory_limit", -1, "memory_limit: -1 is not possible; expected more than 0 bytes"),
        ("global_batch", 0, "global_batch: 0 is not possible; expected at least 1"),
        ("trials", "many", "trials: 'many' is not a whole number; expected at least 1"),
        ("seed", 2**32, "seed: 4294967296 is not possible; expected a number from 0 to 4294967295"),
        ("eval", "yes", "eval: 'yes' is not possible; expected True or False"),
        ("fix", ["amp"], "fix: 'amp' is not NAME=CHOICE; expected for example amp=bf16"),
    ],
)
def test_what_is_not_possible_is_refused_with_what_was_expected(option: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of(**{option: value})
    assert str(refused.value).startswith(expected)


BAD = {
    kinds.SECONDS: ["0", "0s", "-5s", "-5", "-.5m", "nan", "-nan", "inf", "-inf", "soon", "5 weeks", "9" * 400, ""],
    kinds.COUNT: ["0", "-3", "-3.5", "2.5", "nan", "inf", "-inf", "many", "1e3", ""],
    kinds.SEED: ["-1", "-1.5", "nan", "inf", "some", str(2**32), ""],
    kinds.SHARE: ["-5%", "-0.05", "100%", "1", "nan", "inf", "-inf", "most", ""],
    kinds.MEMORY: ["0", "0%", "-1GiB", "-1", "-20%", "120%", "0.2B", "nan", "inf", "-inf", "lots", "9" * 400, ""],
}
PYTHON: list[Any] = [
    -5,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    [1],
    b"5",
]  # none of them is possible for any option


@pytest.mark.parametrize("command", COMMANDS)
def test_every_duration_size_share_and_number_that_is_not_possible_is_refused_with_what_was_expected(
    command: str,
) -> None:
    parser = build_parser()
    for option in table(COMMANDS[command]):
        for text in BAD.get(option.kind, ()):
            needed = [] if option.flag in NEEDED.get(command, []) else NEEDED.get(command, [])
            for given_as in ([option.flag, text], [f"{option.flag}={text}"]):
                with pytest.raises(UsageError) as refused:
                    parser.parse_args([command, "model.py", *needed, *given_as])
                read = int(text) if re.fullmatch(r"-?\d+", text) and option.kind in (kinds.COUNT, kinds.SEED) else text
                assert f"argument {option.flag}: {read!r} is not " in str(refused.value)
                assert "; expected " in str(refused.value)
        for value in PYTHON if option.kind in BAD else []:
            needed_options = {"verify": {"steps": 1}, "sweep": {"out": "x.csv"}}.get(command, {})
            with pytest.raises(ConfigError, match=rf"^{option.name}: .* is not .*; expected "):
                COMMANDS[command].of({**needed_options, option.name: value}, total_bytes=lambda device: GIB)


def test_an_unknown_option_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"no option 'bugdet'; did you mean budget\?"):
        of(bugdet="5m")


def test_a_required_option_that_is_missing_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="num_steps"):
        VerifyOptions.of({})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_and_the_python_function_take_the_options_of_one_table(command: str) -> None:
    names = [option.name for option in table(COMMANDS[command])]
    function = getattr(api, command)
    signature = inspect.signature(function)
    assert set(names) <= signature.parameters.keys()
    assert "options" not in signature.parameters
    assert all(f"\n        {name}: " in function.__doc__ for name in names)
    parsed = build_parser().parse_args([command, "model.py", *NEEDED.get(command, [])])
    required = {option.name for option in table(COMMANDS[command]) if f"--{option.name}" in NEEDED.get(command, [])}
    assert options_given(parsed, COMMANDS[command]).keys() == required


def test_the_signature_has_the_defaults_of_the_options() -> None:
    parameters = inspect.signature(api.search).parameters
    assert parameters["budget"].default == SearchOptions().budget_s
    assert parameters["probe_timeout"].annotation == "str | float | None"
    assert inspect.signature(api.verify).parameters["steps"].default is inspect.Parameter.empty


def test_what_was_given_on_the_command_line_is_what_the_options_are_made_of() -> None:
    line = [
        "search",
        "model.py",
        "--memory-limit",
        "1GiB",
        "--fix",
        "amp=bf16",
        "--fix",
        "num_workers=2",
        "--seed",
        "7",
    ]
    parsed = build_parser().parse_args([*line, "--include", "amp", "--replay", "table.csv"])
    options = SearchOptions.of(options_given(parsed, SearchOptions))
    assert options == SearchOptions(
        memory_limit_bytes=GIB, fix={"amp": "bf16", "num_workers": 2}, seed=7, include=("amp",)
    )
    assert parsed.replay == "table.csv"


def test_a_switch_has_no_value_on_the_command_line() -> None:
    parsed = build_parser().parse_args(["search", "model.py", "--eval"])
    assert SearchOptions.of(options_given(parsed, SearchOptions)).eval and not of().eval


def test_what_was_asked_of_a_search_is_written_as_words_of_a_command_line() -> None:
    options = of(device="cpu", global_batch=96, memory_limit="1536MiB", budget="1m")
    asked = options.asked()
    assert asked == {"device": "cpu", "global_batch": 96, "memory_limit": 1536 * 2**20}
    assert words(asked) == ["--device", "cpu", "--memory-limit", "1536MiB", "--global-batch", "96"]
    assert SearchOptions().asked() == {}
