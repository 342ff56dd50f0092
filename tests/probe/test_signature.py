"""The signature of a model: equal for one architecture, whatever its names, values and seeds."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import fields

import torch
from torch import nn

from autotune.probe.inspection import inspect_task
from autotune.records.inspection import Inspection
from autotune.records.signature import Layer, LossKind, ModelSignature
from autotune.records.study import SearchFacts
from autotune.study.place import place_of
from autotune.study.reading import load_study
from autotune.study.store import Store
from autotune.task import Task


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def renamed() -> nn.Module:
    """As `small`, under other names, in another nesting and with other values."""
    torch.manual_seed(7)
    body = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
    return nn.Sequential(OrderedDict(entry=nn.Linear(4, 8), act=nn.ReLU(), body=body, head=nn.Linear(8, 3)))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(9, 3))


def classified(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,))


def signature(build_model, make_batch=classified, **fields) -> ModelSignature:
    task = Task(build_model=build_model, make_batch=make_batch, **fields)
    told = json.loads(json.dumps(inspect_task(task, device="cpu", memory_limit_bytes=None)))
    found = Inspection.from_dict(told).signature
    assert found is not None
    return found


def differing(one: ModelSignature, other: ModelSignature) -> set[str]:
    return {field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)}


def test_models_of_one_architecture_have_one_signature_and_others_differ_by_field() -> None:
    found = signature(small)
    assert found == signature(renamed)
    assert found.layers == (
        Layer(kind="Linear", shapes=((3, 8), (3,)), count=1),
        Layer(kind="Linear", shapes=((8, 4), (8,)), count=1),
        Layer(kind="Linear", shapes=((8, 8), (8,)), count=2),
        Layer(kind="ReLU", shapes=(), count=1),
    )
    assert (found.num_parameters, found.dtypes, found.loss) == (211, ("float32",), LossKind.CROSS_ENTROPY)
    assert differing(found, signature(wider)) == {"layers", "num_parameters"}


def test_a_loss_is_told_by_where_it_comes_from() -> None:
    def regression(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 4), torch.randn(size, 3)

    def own(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.l1_loss(model(batch[0]), batch[1])

    found = signature(small)
    assert differing(found, signature(small, regression)) == {"loss"}
    assert signature(small, regression).loss is LossKind.MEAN_SQUARED_ERROR
    assert signature(small, regression, training_step=own).loss is LossKind.OWN


def test_a_study_keeps_the_signature_and_an_older_one_has_none(tmp_path) -> None:
    place, found = place_of(str(tmp_path / "some.db"), None, "some"), signature(small)
    Store(place, SearchFacts(signature=found))
    assert load_study(tmp_path / "some.db").facts.signature == found
    assert SearchFacts.from_dict({"task": "some"}).signature is None
