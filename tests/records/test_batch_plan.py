"""The rule about the global batch, in a world of one process and of several."""

import pytest

from autotune.errors import ConfigError
from autotune.probe.batch_support import batch_support
from autotune.records.batch_plan import BatchPlan, divisors, largest_batch_size, share_of
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.records.settings import ProbeSettings
from autotune.records.world import ALONE, World
from autotune.session import prepare
from autotune.space import build_space
from autotune.task import Task
from autotune.techniques import find_techniques
from tests.closed_form import inspection
from tests.models import tiny

techniques = find_techniques()
TWO = World(size=2, rank=1)
SHARDED = World(size=4, data_parallel=2)


def test_all_processes_share_the_samples_unless_stated():
    assert (ALONE.data_parallel, TWO.data_parallel, SHARDED.data_parallel) == (1, 2, 2)
    with pytest.raises(ConfigError, match=r"4 processes does not divide into 3"):
        World(size=4, data_parallel=3)


@pytest.mark.parametrize("world", [TWO, SHARDED])
def test_a_step_takes_the_samples_of_all_that_share_them(world):
    plan = BatchPlan(8, 3, world)
    assert (plan.samples_per_process, plan.samples_per_step) == (24, 48)
    assert plan.keeps(48) and plan.keeps(None) and not plan.keeps(24)
    assert BatchPlan.keeping(48, 8, world) == plan
    assert largest_batch_size(20, 48, world) == 12
    with pytest.raises(ConfigError, match=r"does not divide each process's 24 of the global batch 48.*nearest.* is 4"):
        BatchPlan.keeping(48, 5, world)


def test_a_global_batch_that_cannot_be_shared_says_which_can():
    with pytest.raises(ConfigError, match="7 cannot be shared by 2 processes; give --global-batch 6"):
        share_of(7, TWO)


def test_configs_spaces_and_sessions_follow_the_rule_of_their_world():
    config = techniques.complete({"batch_size": 8}, global_batch=48, world=TWO)
    assert config.accumulation_steps == 3 and config.plan_in(TWO).samples_per_step == 48
    with pytest.raises(ConfigError, match=r"batch_size 8 x accumulation_steps 6 x 2 processes is 96 samples"):
        techniques.complete({"batch_size": 8, "accumulation_steps": 6}, global_batch=48, world=TWO)
    support = batch_support(BatchPlan(4, 12, TWO), global_batch=96)
    assert support.sizes == support.accumulation_steps == tuple(divisors(48))
    found = inspection(
        world=TWO, batch=support, baseline=techniques.complete({"batch_size": 4}, global_batch=96, world=TWO).as_dict()
    )
    space, _ = build_space(found, techniques)
    assert {one.samples_per_step for one in space} == {48}
    smaller = space.with_smaller_baseline()
    assert smaller is not None and smaller.baseline.plan_in(TWO).samples_per_step == 96
    task = Task(build_model=tiny.build_model, make_batch=tiny.make_batch)
    session = prepare(task, {"batch_size": 4}, device="cpu", global_batch=16, world=TWO)
    assert (session.world, session.config.accumulation_steps) == (TWO, 2)


def test_what_was_kept_before_there_were_worlds_is_of_one_process():
    for record in (Outcome(kind=Kind.OK), ProbeSettings(memory_limit_bytes=None), inspection()):
        old = {name: value for name, value in record.to_dict().items() if name != "world"}
        assert type(record).from_dict(old).world == ALONE
    assert Inspection.from_dict(inspection(world=TWO).to_dict()).world == TWO
    assert World.from_dict({"size": 2, "rank": 1}) == TWO
