"""Configs worth a probe before any model of the space exists: every technique once, then what usually wins, at rising batches."""

from __future__ import annotations

from autotune import techniques
from autotune.records.config import Choice, Config
from autotune.space import Space

_LIKELY = {
    "amp": ("bf16", "fp16"),
    "matmul_precision": ("tf32",),
    "channels_last": (True,),
    "optimizer_impl": ("fused", "foreach"),
    "num_workers": (2, 1),
}


def starting_configs(space: Space, *, baseline_fits: bool, objective: str) -> list[tuple[Config, str]]:
    """Configs to begin with, each with its reason.

    With a baseline that runs: each likely technique alone, all together, and all together at two and four times the batch,
    or, where memory is the objective, at a half and a quarter of it and with checkpointing.
    Without one: the least memory there is, to find something that fits.
    """
    switched: dict[str, Choice] = {}
    configs: list[tuple[Config, str]] = []
    for name, likely in _LIKELY.items():
        choice = next((c for c in likely if c in space.choices.get(name, ()) and c != space.baseline[name]), None)
        if choice is not None:
            switched[name] = choice
            configs.append((space.complete({name: choice}), f"{name} alone"))
    if not baseline_fits:
        smallest: dict[str, Choice] = {"batch_size": space.choices["batch_size"][0]}
        if len(segments := space.choices["checkpoint_segments"]) > 1:
            smallest["checkpoint_segments"] = segments[-1]
        lean = {**switched, **smallest}
        least = [(space.complete(smallest), "least memory"), (space.complete(lean), "least memory, all switched")]
        return [(config, reason) for config, reason in least if space.contains(config)]
    if len(switched) > 1:
        configs.append((space.complete(switched), "all together"))
    if objective == "memory":
        for divisor in (2, 4):
            smaller = [size for size in space.choices["batch_size"] if int(size) * divisor <= space.baseline.batch_size]
            if smaller:
                configs.append((space.complete({**switched, "batch_size": smaller[-1]}), f"1/{divisor} of the batch"))
        checkpointed = space.complete({**switched, "checkpoint_segments": space.choices["checkpoint_segments"][-1]})
        configs.append((checkpointed, "all checkpointed"))
    for factor in (2, 4) if objective != "memory" else ():
        larger = [size for size in space.choices["batch_size"] if int(size) >= factor * space.baseline.batch_size]
        if larger:
            configs.append((space.complete({**switched, "batch_size": larger[0]}), f"{factor}x the batch"))
    unique = {
        config: reason for config, reason in reversed(configs) if space.contains(config) and config != space.baseline
    }
    return list(reversed(unique.items()))


def one_change_back(config: Config, space: Space) -> list[tuple[Config, str]]:
    """The config with each of its changes from the baseline undone in turn: what each one gains, and whether it is needed."""
    undone = []
    for name in config.differences(space.baseline):
        if name != "accumulation_steps" and name in techniques.REGISTRY:
            without = space.complete({**config.as_dict(), name: space.baseline[name]})
            if space.contains(without):
                undone.append((without, f"the best without {name}"))
    return undone
