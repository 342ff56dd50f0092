"""How many gradients are averaged at a time."""

from __future__ import annotations

from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor
from autotune.techniques.frameworks import At, Lines, Option, words
from autotune.techniques.spread_option import SpreadOption


class BucketMb(SpreadOption):
    """`bucket_cap_mb`: small buckets begin to travel early in the backward pass, large ones use the wire better."""

    name = "bucket_mb"
    summary = (
        "size of the buckets in which gradients are averaged: overlap with the backward pass against use of the wire"
    )
    applies = "several devices, copies of the model"
    choices = (1, 5, 25, 100)
    off = 25
    least = 1
    ordered = True
    of_shards = False
    expected = Expectation(launch=Factor(spread=1.1), compute=Factor(spread=1.05))
    frameworks = words(
        transformers=Option("ddp_bucket_cap_mb", off),
        lightning=Option("strategy.bucket_cap_mb", off),
        accelerate=Option("kwargs_handlers.bucket_cap_mb", off),
        torch=Lines({At.SPREAD: "bucket_cap_mb={choice}"}),
    )

    def label(self, choice: Choice) -> str:
        return f"buckets of {choice} MiB"

    def apply(self, build: Build, choice: Choice) -> None:
        build.ddp_options["bucket_cap_mb"] = choice
