"""Traces kept on disk: shared between searches of a task, and never of another one."""

from __future__ import annotations

import json
from dataclasses import replace

from autotune import techniques
from autotune.predict.cache import cached_traces
from autotune.predict.plan import plan_traces
from autotune.predict.traces import Traces
from tests.predict.test_traces import DEFAULT, PLAIN, fit, piece

FACTS = {"name": "task", "source_hash": "abc", "num_parameters": 10}
CONFIGS = [
    techniques.complete({"batch_size": 4, "accumulation_steps": 1, "amp": amp}) for amp in ("off", "bf16", "fp16")
]


class Prober:
    """Says what it was asked to trace, and knows all but fp16."""

    def __init__(self, plain=PLAIN, update=DEFAULT, *, fails=False):
        self.plain, self.update, self.fails = plain, update, fails
        self.asked = []

    def trace(self, configs, target, timeout_s, *, known=None):
        known = known or Traces(target=target)
        left = plan_traces(configs).without(known)
        self.asked.append(left.labels())
        if self.fails:
            return known.merged(Traces(target=target, failures=dict.fromkeys(left.labels(), "no time")))
        models = {group: replace(self.plain) for group in left.models if group != (("amp", "fp16"),)}
        failures = {"model: amp=fp16": "why"} if (("amp", "fp16"),) in left.models else {}
        updates = dict.fromkeys(left.updates, self.update)
        return known.merged(Traces(target=target, models=models, updates=updates, failures=failures))


def ask(folder, prober, configs=CONFIGS, target="cpu", facts=FACTS):
    return cached_traces(prober, configs, target, facts=facts, folder=folder / "traces", timeout_s=1)


def test_a_second_search_traces_plain_training_and_what_failed(tmp_path):
    first = ask(tmp_path, Prober())
    prober = Prober()
    assert ask(tmp_path, prober) == first
    assert prober.asked == [["model: nothing switched on", "optimizer: nothing switched on"], ["model: amp=fp16"]]
    assert first.failures == {"model: amp=fp16": "why"}


def test_sizes_that_changed_without_the_source_are_noticed(tmp_path):
    ask(tmp_path, Prober())
    larger = replace(PLAIN, alone=fit(piece(9000, 10)))
    assert set(ask(tmp_path, Prober(larger)).models.values()) == {larger}


def test_an_optimizer_that_changed_without_the_source_is_noticed(tmp_path):
    configs = [*CONFIGS, CONFIGS[0].replace(optimizer_impl="fused")]
    ask(tmp_path, Prober(), configs)
    smaller = replace(DEFAULT, state_bytes=0.0)
    assert set(ask(tmp_path, Prober(update=smaller), configs).updates.values()) == {smaller}


def test_what_is_kept_outlives_a_check_that_found_no_time(tmp_path):
    first = ask(tmp_path, Prober())
    late = Prober(fails=True)
    assert ask(tmp_path, late).models == {}
    assert len(late.asked) == 1
    assert ask(tmp_path, Prober()) == first


def test_another_task_target_or_space_has_traces_of_its_own(tmp_path):
    ask(tmp_path, Prober())
    for changes in (
        {"facts": {**FACTS, "source_hash": "abd"}},
        {"target": "cuda"},
        {"configs": [CONFIGS[0].replace(batch_size=8)]},
    ):
        prober = Prober()
        ask(tmp_path, prober, **changes)
        assert len(prober.asked) == 1
    assert len(list((tmp_path / "traces").iterdir())) == 4


def test_a_broken_or_foreign_file_is_replaced(tmp_path):
    first = ask(tmp_path, Prober())
    (file,) = (tmp_path / "traces").iterdir()
    for content in ("", "[]", '{"format": 99}', "\x00"):
        file.write_text(content)
        assert ask(tmp_path, Prober()) == first
        assert Traces.from_dict(json.loads(file.read_text())).models == first.models


def test_a_folder_that_cannot_be_written_costs_no_more_than_time(tmp_path):
    (tmp_path / "traces").write_text("a file")
    assert ask(tmp_path, Prober()).models
