"""The graph of the loss is the same in every step."""

from __future__ import annotations

from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Setting, Switch
from autotune.techniques.frameworks import At, Lines, Option, words
from autotune.techniques.spread_option import SpreadOption


class DdpStaticGraph(SpreadOption, Switch):
    """`static_graph=True`: DDP learns in the first step which gradients come when. Where steps differ, they are wrong or it fails."""

    name = "ddp_static_graph"
    summary = "the order of gradients is learned once: less to look for in each step"
    applies = "if included: several devices, copies of a model whose loss uses the same parameters in every step"
    of_shards = False
    expected = Expectation(launch=Factor(typical=0.98, spread=1.05))
    frameworks = words(
        transformers=Option("ddp_static_graph", False),
        lightning=Option("strategy.static_graph", False),
        accelerate=Option("kwargs_handlers.static_graph", False),
        torch=Lines({At.SPREAD: "static_graph={choice}"}),
    )

    def why_optional(self, setting: Setting) -> str:
        return "whether each step uses the same parameters is not known from a few of them"

    def conflict(self, config: Config) -> str:
        """DDP puts the gradients of the first backward pass together, whether it is to or not."""
        several = (
            "DDP learns the order of gradients in a step of one micro batch" if config.accumulation_steps > 1 else ""
        )
        return super().conflict(config) or several

    def apply(self, build: Build, choice: Choice) -> None:
        build.ddp_options["static_graph"] = True
        build.one_micro_batch = "ddp_static_graph learns the order of gradients in a step of one"
