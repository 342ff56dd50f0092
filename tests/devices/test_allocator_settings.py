"""What the environment gives torch's CUDA allocator is read as torch reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from autotune.devices.allocator_settings import NEWER, OLDER, settings_in, tells_settings

ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {OLDER: "max_split_size_mb:64"},
    {NEWER: "max_split_size_mb:32"},
    {OLDER: "max_split_size_mb:64", NEWER: "max_split_size_mb:32"},
    {OLDER: "", NEWER: "max_split_size_mb:32"},
]
TORCH_READS = """
import json, os, sys, torch
for environment in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ.update(environment)
        print(json.dumps(torch._C._accelerator_getAllocatorSettings()), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not tells_settings(), reason="this torch does not tell them")
def test_torch_reads_the_same() -> None:
    command = [sys.executable, "-c", TORCH_READS, json.dumps(ENVIRONMENTS)]
    unset = {name: value for name, value in os.environ.items() if name not in (OLDER, NEWER)}
    told = subprocess.run(command, env=unset, capture_output=True, text=True, check=True).stdout
    assert [json.loads(line) for line in told.splitlines()] == [*map(settings_in, ENVIRONMENTS)]


def test_a_torch_that_tells_none_reads_the_older_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    assert settings_in({NEWER: "max_split_size_mb:32"}) == ""
    assert settings_in({OLDER: "max_split_size_mb:64", NEWER: "max_split_size_mb:32"}) == "max_split_size_mb:64"
