"""What Accelerate does to a loop is read of its launcher and of the `Accelerator` that is there."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import TaskError
from tests.integrations.answers import LAUNCHED

accelerate = pytest.importorskip("accelerate")
from accelerate import utils  # noqa: E402

from autotune.integrations.accelerator import (  # noqa: E402
    choices_of_launcher,
    choices_of_loop,
    choices_of_shards,
    groups_of,
    require_whole_samples,
    settings_of,
)


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """One process has one precision, and tests of other files have chosen theirs."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


def plugin(version: int, kept: Any, offload: Any) -> Any:
    """Accelerate's settings of FSDP, which it makes on a GPU alone."""
    name = "sharding_strategy" if version == 1 else "reshard_after_forward"
    fields = {"sharding_strategy": None, "reshard_after_forward": None, name: kept}
    return SimpleNamespace(fsdp_version=version, cpu_offload=offload, **fields)


def test_what_accelerate_shards_is_read_with_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    found = choices_of_shards(plugin(2, True, OffloadPolicy()), {"mixed_precision": "bf16"}, {})
    assert found == {"amp": "off", "parallel": "fsdp", "shard_dtype": "bf16", "shard_offload": False}
    for settings in (
        plugin(2, False, CPUOffloadPolicy()),
        plugin(1, ShardingStrategy.SHARD_GRAD_OP, CPUOffload(offload_params=True)),
    ):
        found = choices_of_shards(settings, {"mixed_precision": "no"}, {})
        assert found == {"amp": "off", "parallel": "fsdp_grad", "shard_offload": True}
    copies = plugin(1, ShardingStrategy.NO_SHARD, CPUOffload())
    with pytest.raises(
        TaskError, match=r"\(NO_SHARD, no\), which probes do not; expected one that shards, in fp32 or bf16"
    ):
        choices_of_shards(copies, {"mixed_precision": "no"}, {})
    with pytest.raises(TaskError, match=r"\(version 2, fp16\), which probes do not"):
        choices_of_shards(plugin(2, True, OffloadPolicy()), {"mixed_precision": "fp16"}, {})


def groups(**sizes: int) -> Any:
    """What an Accelerator's state keeps of its groups of processes."""
    return SimpleNamespace(parallelism_config=SimpleNamespace(**sizes))


def test_copies_of_shards_are_read_and_what_shares_out_a_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of four; as `accelerate launch` says it, and as an Accelerator has it that is there."""
    from torch.distributed.fsdp import OffloadPolicy

    for name, value in {**LAUNCHED, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    hybrid = groups_of(groups(dp_replicate_size=2, dp_shard_size=2))
    found = choices_of_shards(plugin(2, True, OffloadPolicy()), {"mixed_precision": "no"}, hybrid)
    assert found["parallel"] == "hsdp:2"
    with pytest.raises(TaskError, match=r"version 2, in copies, not resharded, no\), which probes do not"):
        choices_of_shards(plugin(2, False, OffloadPolicy()), {"mixed_precision": "no"}, hybrid)
    with pytest.raises(TaskError, match=r"share out sequences \(cp_size=2\).*with cp_size=1 first"):
        require_whole_samples(groups_of(groups(dp_shard_size=2, cp_size=2)))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for name in ("DP_REPLICATE", "DP_SHARD"):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", "2")
    monkeypatch.setattr("autotune.integrations.accelerator.fsdp_plugin", lambda: plugin(2, True, OffloadPolicy()))
    assert choices_of_launcher()["parallel"] == "hsdp:2"
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(TaskError, match=r"share out tensors \(tp_size=2\).*`autotune search --command`"):
        choices_of_launcher()


def accelerator_of(**arguments: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **arguments)


def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


def test_what_an_accelerator_was_given_for_itself_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 32 is that of both processes."""
    of_ddp = utils.DistributedDataParallelKwargs(
        bucket_cap_mb=100, broadcast_buffers=False, find_unused_parameters=True
    )
    made = accelerator_of(
        kwargs_handlers=[of_ddp, utils.AutocastKwargs(enabled=False)],
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True, dispatch_batches=True),
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=4),
    )
    launch(monkeypatch)
    choices, told = settings_of(made, 32)
    options = {"bucket_mb": 100, "ddp_bucket_view": False, "ddp_static_graph": False}
    assert choices == {"batch_size": 16, "accumulation_steps": 4, "amp": "off", **options}
    assert told == (
        "the script's DDP has broadcast_buffers=False, and that of probes not",
        "the script's DDP has find_unused_parameters=True, and that of probes only where the loss leaves parameters out",
        "each process of a probe loads its samples itself, and not the first for all (dispatch_batches)",
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {
                "kwargs_handlers": [
                    utils.DistributedDataParallelKwargs(comm_hook=utils.DDPCommunicationHookType.POWER_SGD)
                ]
            },
            r"by a hook \(comm_hook=POWER_SGD\), .*leave comm_hook out",
        ),
        (
            {"gradient_accumulation_plugin": utils.GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)},
            r"\(sync_each_batch\), .*leave sync_each_batch out",
        ),
    ],
    ids=["comm_hook", "sync_each_batch"],
)
def test_what_probes_do_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], told: str
) -> None:
    made = accelerator_of(**arguments)
    launch(monkeypatch)
    with pytest.raises(TaskError, match=told):
        settings_of(made, 32)


def test_the_accelerator_that_is_there_is_found_and_none_that_is_gone() -> None:
    assert choices_of_loop(32) == ({}, ())
    first = accelerator_of(gradient_accumulation_steps=4)
    assert choices_of_loop(32) == ({"accumulation_steps": 4}, ())
    made = accelerator_of(kwargs_handlers=[utils.AutocastKwargs(enabled=False)], gradient_accumulation_steps=4)
    with pytest.raises(TaskError, match=r"2 Accelerators are there, with unlike settings .*'amp': 'off'.*make one"):
        choices_of_loop(32)
    del first
    assert choices_of_loop(32) == ({"accumulation_steps": 4, "amp": "off"}, ())
    del made
    assert choices_of_loop(32) == ({}, ())


def test_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(TaskError, match=r"fp8, which probes do not; .*--mixed_precision bf16"):
        choices_of_launcher()
