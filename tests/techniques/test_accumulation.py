from torch import nn

from autotune.techniques.accumulation import Accumulation


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_steps_follow_from_the_global_batch(make_task, make_setting):
    support = Accumulation().support(make_setting(make_task(lambda: nn.Linear(8, 4), global_batch=12)))
    assert support.choices == (1, 2, 3, 4, 6, 12)
    assert support.optional == ()


def test_without_a_global_batch_there_is_one_step(make_task, make_setting):
    assert Accumulation().support(make_setting(make_task(lambda: nn.Linear(8, 4)))).choices == (1,)


def test_with_batch_norm_accumulating_more_than_the_baseline_has_to_be_asked_for(make_task, make_setting):
    task = make_task(with_batch_norm, global_batch=12)
    support = Accumulation().support(make_setting(task, baseline={"batch_size": 6}))
    assert support.choices == (1, 2)
    assert support.optional == (3, 4, 6, 12)
    assert "batch normalisation" in support.reason and "batch normalisation" in support.note


def test_frozen_batch_norm_does_not_mind(make_task, make_setting):
    setting = make_setting(make_task(with_batch_norm, global_batch=12), baseline={"batch_size": 12})
    setting.model[1].eval()
    assert Accumulation().support(setting).optional == ()


def test_layer_norm_does_not_mind(make_task, make_setting):
    task = make_task(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), global_batch=4)
    assert Accumulation().support(make_setting(task)).optional == ()
