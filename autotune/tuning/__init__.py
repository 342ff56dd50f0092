"""The search: budget, baseline, exploring, checks, play-off, recommendation; and sweeps.

The package is named `tuning` because `autotune.search` is the function.
"""
