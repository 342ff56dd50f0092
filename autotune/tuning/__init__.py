"""The search: the space in Optuna, samplers, the loop, the play-off, the recommendation. The only place that imports optuna.

Named `tuning`, since `autotune.search` is the function.
"""
