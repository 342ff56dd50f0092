"""The examples in the docstrings of what others subclass are code that runs."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.export import base as exporters
from autotune.proposers import base as proposers
from autotune.techniques import base as techniques
from tests.closed_form import ClosedFormRunner, make_search
from tests.report.sample_study import answer


def example_of(described: type, home: Any) -> dict[str, Any]:
    """What the example in a class's docstring defines, beside what its file knows."""
    paragraphs = re.split(r"\n\n(?! )", inspect.getdoc(described) or "")
    (example,) = [text for text in paragraphs if re.search(r"^    class ", text, re.MULTILINE)]
    code = textwrap.dedent("\n".join(line for line in example.splitlines() if not line or line.startswith("    ")))
    names = {**vars(home), "json": json, "torch": torch}
    exec(compile(code, f"the example of {described.__name__}", "exec"), names)
    return names


def test_the_techniques_switches_what_it_says_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = example_of(techniques.Technique, techniques)["Deterministic"]()
    with technique.restored():
        technique.apply(None, True)
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert technique.validate(True) is True


def test_the_exporter_says_what_it_has_words_for_and_lists_the_rest() -> None:
    result = answer("sqlite:///gpt.db")
    export = example_of(exporters.Exporter, exporters)["Toml"]().export(result, space={})
    assert tomllib.loads(export.text) == {"precision": result.config["amp"], "micro_batch": result.config["batch_size"]}
    assert "accumulation_steps" in export.unsaid


def test_the_proposer_proposes_the_largest_batch_that_is_left(tmp_path: Path) -> None:
    names = example_of(proposers.Proposer, proposers)
    history = make_search(tmp_path, ClosedFormRunner()).history
    proposal = names["SAMPLERS"]["largest-batch"](None, 0).propose(history)
    assert proposal.config.batch_size == max(config.batch_size for config in history.space)
