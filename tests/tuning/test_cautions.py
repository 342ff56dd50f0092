"""What is said beside an answer."""

from types import SimpleNamespace

from autotune.records.config import World
from autotune.space import build_space
from autotune.techniques import find_techniques
from autotune.tuning.cautions import other_batch
from tests.closed_form import inspection

techniques = find_techniques()


def test_another_global_batch_is_told_in_the_samples_of_all_processes():
    alone, pair = World(), World(size=2)
    for world, old in ((alone, 4), (pair, 8)):
        baseline = techniques.complete({"batch_size": 4}, global_batch=None, world=world)
        found = inspection(global_batch=None, baseline=baseline.as_dict(), world=world)
        space, _ = build_space(found, techniques)
        search = SimpleNamespace(inspection=found, history=SimpleNamespace(space=space))
        (text,) = other_batch(SimpleNamespace(search=search, config=baseline.replace(batch_size=8)))
        assert f"takes {2 * old} samples per optimizer step where the baseline takes {old}" in text
        assert "by 2 (linear" in text and f"--global-batch {old}" in text
