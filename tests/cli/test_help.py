"""`--help` names every option in a group with a title, and a shell completes commands, options and choices."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.cli.parser import SHELLS, build_parser

COMMANDS = build_parser().commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_in_a_group_with_a_title(name: str) -> None:
    loose = [action.option_strings for action in COMMANDS[name]._optionals._group_actions]
    assert loose == [["-h", "--help"]]
    groups = [group.title for group in COMMANDS[name]._action_groups[2:]]
    assert len(groups) == len(set(groups)) and groups


def test_every_option_and_command_has_a_text() -> None:
    for name, parser in COMMANDS.items():
        assert parser.description, name
        silent = [
            action.option_strings
            for action in parser._actions
            if not action.help and not isinstance(action, argparse._SubParsersAction) and action.option_strings
        ]
        assert not silent, name


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    import autotune

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"autotune {autotune.__version__}\n"


def completed(line: str) -> set[str]:
    """What a shell is offered at the end of a line."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "autotune"], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {word.strip() for word in done.stdout.split("\n") if word.strip()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autotune se", {"search"}),
        ("autotune search model.py --mem", {"--memory-limit"}),
        ("autotune search model.py --objective ba", {"balanced"}),
        ("autotune search model.py --exclude checkpoint_s", {"checkpoint_segments"}),
        ("autotune export gpt --to deep", {"deepspeed"}),
        ("autotune completion z", {"zsh"}),
    ],
)
def test_commands_options_and_choices_are_completed(line: str, expected: set[str]) -> None:
    assert completed(line) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_the_code_that_asks_for_completions(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "autotune" in code and "_ARGCOMPLETE" in code
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=code, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_by_it(tmp_path: Path) -> None:
    command = tmp_path / "autotune"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m autotune "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(autotune completion bash)"
        COMP_WORDS=(autotune dev) COMP_CWORD=1 COMP_LINE="autotune dev" COMP_POINT=12 COMP_TYPE=9
        $(complete -p autotune | sed 's/.*-F \\([^ ]*\\).*/\\1/') autotune dev autotune
        echo "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["devices"], done.stderr
