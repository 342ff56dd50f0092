"""The graph of the loss is the same in every step."""

from __future__ import annotations

from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Setting, Switch
from autotune.techniques.spread_option import SpreadOption


class DdpStaticGraph(SpreadOption, Switch):
    """`static_graph=True`: DDP learns in the first step which gradients come when. Where steps differ, they are wrong or it fails."""

    name = "ddp_static_graph"
    summary = "the order of gradients is learned once: less to look for in each step"
    applies = "if included: several devices, copies of a model whose loss uses the same parameters in every step"
    of_shards = False
    expected = Expectation(launch=Factor(typical=0.98, spread=1.05))

    def why_optional(self, setting: Setting) -> str:
        return "whether each step uses the same parameters is not known from a few of them"

    def apply(self, build: Build, choice: Choice) -> None:
        build.ddp_options["static_graph"] = True
