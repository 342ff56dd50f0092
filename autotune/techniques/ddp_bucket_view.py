"""Gradients lie in the buckets in which they are averaged."""

from __future__ import annotations

from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Switch
from autotune.techniques.frameworks import At, Lines, Option, words
from autotune.techniques.spread_option import SpreadOption


class DdpBucketView(SpreadOption, Switch):
    """`gradient_as_bucket_view=True`: gradients are views into DDP's buckets, not copies of what lies there."""

    name = "ddp_bucket_view"
    summary = "gradients are views into the buckets in which they are averaged: one copy of them less"
    applies = "several devices, copies of the model"
    of_shards = False
    likely = (True,)
    leanest = (True,)
    expected = Expectation(update=Factor(typical=0.97, spread=1.1), state=Factor(typical=0.8, spread=1.15))
    frameworks = words(
        lightning=Option("strategy.gradient_as_bucket_view", False),
        accelerate=Option("kwargs_handlers.gradient_as_bucket_view", False),
        torch=Lines({At.SPREAD: "gradient_as_bucket_view={choice}"}),
    )

    def apply(self, build: Build, choice: Choice) -> None:
        build.ddp_options["gradient_as_bucket_view"] = True
