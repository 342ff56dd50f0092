from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.task import Task
from autotune.task.batches import tensors
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques.device_prefetch import Copier, DevicePrefetch, ahead, memory_on
from tests.batches_of_any_kind import BELIEVED

from .gpus import GPU

techniques = find_techniques()


def with_dataset(num_samples: int = 10) -> Task:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(8, generator=generator), i % 4) for i in range(num_samples)]
    return Task(build_model=lambda: nn.Linear(8, 4), train_dataset=lambda: samples)


def test_a_dataset_on_a_gpu_has_it(make_setting: Any, make_task: Any) -> None:
    assert DevicePrefetch().support(make_setting(with_dataset(), device=GPU)).choices == (False, True)
    assert "no copy" in DevicePrefetch().support(make_setting(with_dataset())).reason
    without = make_setting(make_task(lambda: nn.Linear(8, 4)), device=GPU)
    assert "train_dataset" in DevicePrefetch().support(without).reason


def test_the_next_copy_begins_before_a_batch_is_trained_on() -> None:
    events: list[str] = []

    class Noting(Copier):
        def begin(self, batch: Any) -> Any:
            events.append(f"copy {batch}")
            return lambda: batch

    for batch in ahead(Noting(torch.device("cpu")), iter("abc")):
        events += [f"train {batch}"]
    assert events == ["copy a", "copy b", "train a", "copy c", "train b", "train c"]


def test_a_batch_of_a_class_of_its_own_is_copied_too() -> None:
    task = BELIEVED["graphs"]
    session = prepare(task, {"batch_size": 20, "device_prefetch": True}, device="cpu")
    assert [step.sizes for step in session.loader] == [[20], [20], [10]]
    (copied,) = ahead(Copier(torch.device("meta")), iter([task.batch(2)]))
    assert {tensor.device.type for tensor in tensors(copied)} == {"meta"}


def test_the_batches_and_their_order_stay() -> None:
    steps = []
    for on in (False, True):
        config = {"batch_size": 3, "device_prefetch": on}
        torch.manual_seed(0)
        session = prepare(with_dataset(), config, device="cpu")
        torch.manual_seed(1)
        steps.append([list(step) for step in session.loader])
    assert [len(step[0][1]) for step in steps[0]] == [3, 3, 3, 1]
    torch.testing.assert_close(steps[1], steps[0])


def test_a_step_of_several_micro_batches_is_not_copied_as_a_whole() -> None:
    config = {"batch_size": 2, "accumulation_steps": 2, "device_prefetch": True}
    assert DevicePrefetch().is_redundant(techniques.complete(config))
    with pytest.raises(UnsupportedError, match="all micro batches"):
        prepare(with_dataset(), config, device="cpu")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_the_device_holds_is_found_in_sparse_batches_and_what_stays_behind_is_not() -> None:
    dense = torch.eye(4)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])._replace(
        data=torch.ones(4, 2, device="meta")
    )
    assert [t.shape for t in memory_on("meta", packed)] == [(4, 2)]
    for turned in (dense.to_sparse, dense.to_sparse_csr, dense.to_sparse_csc, lambda: dense.to_sparse_bsr((2, 2))):
        found = list(memory_on("cpu", {"graph": turned()}))
        assert len(found) > 1 and {t.layout for t in found} == {torch.strided}
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert {t.numel() for t in memory_on("cpu", jagged) if t.numel()} == {3, 5}
