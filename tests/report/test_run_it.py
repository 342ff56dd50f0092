"""The lines that run an answer: exactly what was measured, and no longer than that takes."""

from __future__ import annotations

import shlex

import pytest

from autotune.cli.parser import build_parser
from autotune.report.run_it import python_lines, verify_command
from autotune.techniques import find_techniques
from autotune.units import parse_bytes

CONFIG = {"batch_size": 16, "accumulation_steps": 32, "amp": "bf16"}
EVERYTHING: dict[str, str | int] = {"device": "cpu", "global_batch": 512, "memory_limit": 3 * 2**29}


def _lines(model: str, asked: dict[str, str | int], width: int = 80) -> str:
    return "\n".join(line for code in python_lines(model, asked) for line in code.lines(width))


def prepared_with(
    model: str, asked: dict[str, str | int], width: int = 80
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Run the Python lines; returns what `prepare` was called with."""
    calls = []

    class Autotune:
        @staticmethod
        def prepare(*args: object, **options: object) -> object:
            calls.append((args, options))
            return type("Session", (), {"loader": [1, 2], "step": lambda self, batch: batch})()

    exec(_lines(model, asked, width), {"autotune": Autotune, "config": CONFIG, "task": "the task"})
    return calls[0]


def test_nothing_is_said_of_defaults() -> None:
    assert _lines("model.py", {}).splitlines()[0] == 'session = autotune.prepare("model.py", config)'
    command = """autotune verify model.py --config '{"batch_size": 16, "accumulation_steps": 32, "amp": "bf16"}' --steps 100"""
    assert verify_command(CONFIG, find_techniques(), "model.py", {}) == command


def test_what_was_asked_of_the_search_is_given_on() -> None:
    assert prepared_with("my gpt.py:task", EVERYTHING) == (
        ("my gpt.py:task", CONFIG),
        {"device": "cpu", "global_batch": 512},
    )
    options = build_parser().parse_args(
        shlex.split(verify_command(CONFIG, find_techniques(), "my gpt.py:task", EVERYTHING))[1:]
    )
    assert (options.model, options.device, options.global_batch) == ("my gpt.py:task", "cpu", "512")
    assert options.memory_limit == "1536MiB"


@pytest.mark.parametrize("limit", [2**30, 12 * 2**30, 700 * 2**20, 2**20 + 1, 25276502016, 80 * 2**40])
def test_a_memory_limit_is_given_to_the_byte(limit: int) -> None:
    words = shlex.split(verify_command(CONFIG, find_techniques(), "model.py", {"memory_limit": limit}))
    assert parse_bytes(words[words.index("--memory-limit") + 1]) == limit


def test_lines_are_wrapped_between_arguments() -> None:
    model = "a folder with many words/gpt.py"
    assert all(len(line) <= 62 for line in _lines(model, EVERYTHING, 62).splitlines())
    for width in (20, 62, 100):
        assert prepared_with(model, EVERYTHING, width) == prepared_with(model, EVERYTHING)


def test_a_name_with_quotes_and_other_letters_stays_a_name() -> None:
    name = "größtes 'mo\"dell.py"
    assert prepared_with(name, {})[0][0] == name
    assert shlex.split(verify_command(CONFIG, find_techniques(), name, {}))[2] == name


def test_a_task_built_in_python_is_run_from_there() -> None:
    assert prepared_with("", {"device": "cpu"}) == (("the task", CONFIG), {"device": "cpu"})
    assert verify_command(CONFIG, find_techniques(), "", {"device": "cpu"}) == ""
