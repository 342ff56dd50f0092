"""Proposers: each takes the history of trials and returns the config to probe next."""

from autotune.proposers.base import Proposer
from autotune.proposers.registry import proposer_named, sampler_names

__all__ = ["Proposer", "proposer_named", "sampler_names"]
