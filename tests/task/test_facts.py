import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn

from autotune.errors import TaskError
from autotune.task import Task
from autotune.task.facts import check_task, gather_facts

CPU = torch.device("cpu")


def refused(task, *expected):
    with pytest.raises(TaskError) as caught:
        check_task(task, CPU)
    for text in expected:
        assert text in str(caught.value), str(caught.value)
    return caught.value


def test_the_tokens_of_a_sample_are_as_loss_weight_counts_them(load):
    model = """
        def build_model(): return nn.Linear(4, 3)
        def make_batch(n): return torch.zeros(n, 5, 4), torch.tensor([[0, 1, 2, -100, -100]] * n)
        def training_step(model, batch):
            return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    """
    counted = (
        model
        + """
        def loss_weight(batch): return (batch[1] >= 0).sum()
    """
    )
    assert gather_facts(load(model)).tokens_per_sample is None
    assert gather_facts(load(counted)).tokens_per_sample == 3.0
    assert gather_facts(load(counted.replace(">= 0).sum()", ">= 0)[:, 0].sum()"))).tokens_per_sample is None


def test_facts_are_plain_data(load):
    task = load(
        """
        def build_model():
            net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
            net[0].bias.requires_grad_(False)
            return net
        def train_dataset(): return [(torch.zeros(4), i % 3) for i in range(7)]
        GLOBAL_BATCH = 6
        BASELINE = {"batch_size": 2}
        def trainin_step(model, batch): ...
        """,
        name="tiny.py",
    )
    facts = gather_facts(task)
    assert json.dumps(dataclasses.asdict(facts))
    assert facts.name == "tiny"
    assert facts.num_parameters == 4 * 6 + 6 + 6 + 6 + 6 * 3 + 3
    assert facts.num_trainable == facts.num_parameters - 6
    assert facts.optimizer == "AdamW"
    assert facts.parameter_bytes == 4 * (facts.num_parameters + 6 + 6) + 8
    assert facts.has_batchnorm
    assert (facts.dataset_size, sorted(facts.widest)) == (7, list(range(7)))
    assert (facts.global_batch, facts.baseline) == (6, {"batch_size": 2})
    assert facts.batch == ("float32 (2, 4)", "int64 (2,)")
    assert len(facts.warnings) == 1 and "trainin_step" in facts.warnings[0]


def test_facts_of_a_task_without_a_dataset(load):
    facts = gather_facts(load())
    assert facts.dataset_size is None and facts.widest == () and not facts.has_batchnorm and facts.warnings == ()


def stream_of(found):
    return type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(found)})()


@pytest.mark.parametrize("kind", [list, stream_of])
def test_the_small_batch_of_a_dataset_is_of_its_first_samples(kind):
    found = [(torch.zeros(length), torch.tensor(0)) for length in (9, 9, 2, 400)]
    task = Task(build_model=lambda: nn.Linear(4, 3), train_dataset=lambda: kind(found))
    assert gather_facts(task).batch == ("float32 (2, 9)", "int64 (2,)")


@pytest.mark.parametrize(("num_samples", "known"), [(5, 5), (511, 511), (512, None), (600, None)])
def test_a_stream_that_ends_while_it_is_sampled_has_a_size(num_samples, known):
    found = [(torch.zeros(4), torch.tensor(0))] * num_samples
    task = Task(build_model=lambda: nn.Linear(4, 3), train_dataset=lambda: stream_of(found))
    assert gather_facts(task).dataset_size == known


def test_a_batch_that_is_another_each_time_is_no_mark_of_the_task():
    class Cropped(torch.utils.data.Dataset):
        lengths = itertools.count(5)

        def __len__(self):
            return 4

        def __getitem__(self, position):
            return torch.zeros(next(self.lengths) // 2)

    task = Task(build_model=lambda: nn.Linear(4, 3), train_dataset=Cropped)
    assert gather_facts(task).batch == ()


def test_a_collate_function_that_changes_its_samples_is_given_others_each_time():
    class Labelled(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, position):
            return {"x": torch.zeros(3), "label": 1}

    def collate(samples):
        labels = torch.tensor([sample.pop("label") for sample in samples])
        return torch.stack([sample["x"] for sample in samples]), labels

    task = Task(build_model=lambda: nn.Linear(3, 3), train_dataset=Labelled, collate_fn=collate)
    assert gather_facts(task).batch == ("float32 (2, 3)", "int64 (2,)")


@pytest.mark.parametrize("found", [[torch.zeros(3)], [torch.zeros(3), torch.zeros(4)]])
def test_samples_that_make_no_batch_leave_it_empty(found):
    task = Task(build_model=lambda: nn.Linear(3, 3), train_dataset=lambda: found)
    assert gather_facts(task).batch == ()


def test_tied_parameters_count_once():
    def build_model():
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        net[1].weight = net[0].weight
        return net

    assert gather_facts(Task(build_model=build_model, make_batch=torch.zeros)).num_parameters == 16


def test_a_valid_task_passes(load):
    check_task(load("def checkpoint_blocks(model): return [model]\nBASELINE = {'amp': 'bf16'}"), CPU)


def test_what_the_task_evaluates_is_tried_before_the_search(load):
    wrong = load("def eval_step(model, batch): return model(batch[0]).argmax(-1) == batch[1]\nEVAL = True")
    with pytest.raises(TaskError, match=r"eval_step returned .* bool tensor of shape \(2,\); expected a scalar"):
        check_task(wrong, CPU)
    with pytest.raises(TaskError, match="your eval_step raised ZeroDivisionError"):
        check_task(load("def eval_step(model, batch): 1 / 0", name="other.py"), CPU)


@pytest.mark.parametrize(
    ("lines", "evaluates", "samples"),
    [
        ("", False, None),
        ("EVAL = True", True, None),
        ("def train_dataset(): return [(torch.zeros(4), 0)] * 9\nEVAL = True", True, 9),
        ("def eval_dataset(): return [(torch.zeros(4), 0)] * 7", False, 7),
    ],
)
def test_whether_and_on_how_much_it_evaluates_is_a_fact(load, lines, evaluates, samples):
    facts = gather_facts(load(lines))
    assert (facts.evaluates, facts.eval_samples) == (evaluates, samples)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("EVAL = 32", "EVAL in a model file.* is 32; expected True .*eval_step"),
        ("def eval_step(model): pass", r"eval_step\(model\) on line .* cannot be called as eval_step\(model, batch\)"),
        ("def eval_dataset(): return None", "eval_dataset returned None; expected a torch.utils.data.Dataset"),
        ("def train_step(model, optimizers, batch): pass\nEVAL = True", "EVAL is True, and .*; write eval_step"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(load, lines, said):
    with pytest.raises(TaskError, match=said):
        gather_facts(load(lines))


def test_the_step_that_is_tried_leaves_no_trace_in_models_built_later():
    built = []

    def build_model():
        torch.manual_seed(0)
        built.append(nn.Linear(4, 3))
        return built[-1]

    task = Task(build_model=build_model, make_batch=lambda n: (torch.randn(n, 4), torch.zeros(n).long()))
    before = task.model().weight.detach().clone()
    random_state = torch.get_rng_state()
    check_task(task, CPU)
    assert not torch.equal(built[-1].weight, before)  # the step was taken
    torch.set_rng_state(random_state)
    assert torch.equal(task.model().weight, before)


SPARSE = """
    def build_model(): return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    def make_batch(n): return torch.zeros(n).long(), torch.zeros(n).long()
"""


def test_an_optimizer_that_does_not_take_the_models_gradients_is_refused_before_any_probe(load):
    refused(
        load(SPARSE), "a step of AdamW raised RuntimeError", "sparse gradients", "configure_optimizers(model)", "SGD"
    )
    check_task(load(SPARSE + "    def configure_optimizers(model): return torch.optim.SGD(model.parameters())"), CPU)


def test_an_optimizer_that_needs_a_closure_is_refused(load):
    text = "def configure_optimizers(model): return torch.optim.LBFGS(model.parameters())"
    refused(load(text), "a step of LBFGS raised TypeError", "closure", "configure_optimizers(model)")


def test_clipping_that_does_not_take_the_models_gradients_is_refused(load):
    own = "    def configure_optimizers(model): return torch.optim.SGD(model.parameters())\n    MAX_GRAD_NORM = 1.0"
    refused(load(SPARSE + own), "clipping the gradients to 1.0 raised", "MAX_GRAD_NORM")


@pytest.mark.parametrize("amount", ["torch.empty(2**60, dtype=torch.uint8)", "raise MemoryError"])
def test_memory_that_the_optimizer_alone_lacks_is_for_the_probes_to_find(load, amount):
    text = f"""
        class Hungry(torch.optim.SGD):
            def step(self, closure=None): {amount}
        def configure_optimizers(model): return Hungry(model.parameters())
    """
    check_task(load(text), CPU)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def build_model(): raise ValueError('bad')", "your build_model raised"),
        ("def configure_optimizers(model): raise ValueError('bad')", "your configure_optimizers raised"),
        ("def make_batch(n): raise ValueError('bad')", "your make_batch(3) raised"),
        ("def training_step(model, batch): raise ValueError('bad')", "your training_step raised"),
        ("def loss_weight(batch): raise ValueError('bad')", "your loss_weight raised"),
        ("def checkpoint_blocks(model): raise ValueError('bad')", "your checkpoint_blocks raised"),
        ("def train_dataset(): raise ValueError('bad')", "your train_dataset raised"),
    ],
)
def test_an_exception_of_the_users_code_is_told_with_its_line_and_frames(load, text, what):
    error = refused(load(text), f"{what} ValueError: bad (model.py, line 10)", "correct it")
    assert "raise ValueError" in error.frames
    assert "facts.py" not in error.frames and "usercode.py" not in error.frames


def test_frames_hold_the_users_code_and_not_torchs(load):
    error = refused(
        load("def make_batch(n): return torch.zeros(n, 5), torch.zeros(n).long()"),
        "the forward pass of Linear on a tuple of 2",
        "raised RuntimeError",
    )
    assert "site-packages" not in error.frames and "mat1" in error.frames


def test_sys_exit_in_the_users_code_is_refused(load):
    refused(load("def training_step(model, batch): raise SystemExit(4)"), "your training_step called sys.exit(4)")


def test_an_exception_in_the_backward_pass_is_told(load):
    step = """
        def training_step(model, batch):
            output = model(batch[0]).exp()
            loss = output.sum()
            output += 1
            return loss
    """
    refused(load(step), "the backward pass of the loss raised RuntimeError", "in place")


@pytest.mark.parametrize(
    "raising",
    [
        "torch.empty(2**60, dtype=torch.uint8)",
        "raise MemoryError",
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        """
            try: torch.empty(2**60, dtype=torch.uint8)
            except RuntimeError as error: raise ValueError("wrapped") from error""",
    ],
)
def test_a_failed_allocation_goes_through_unchanged(load, raising):
    with pytest.raises((RuntimeError, MemoryError, ValueError)):
        check_task(load(f"        def training_step(model, batch): {raising}"), CPU)


def test_an_exception_that_only_speaks_of_memory_is_the_users(load):
    refused(load("def training_step(model, batch): raise RuntimeError('out of memory')"), "out of memory (model.py")


def test_a_make_batch_with_a_fixed_size_is_found_whatever_the_size(load):
    for size in (2, 3, 32):
        task = load(f"def make_batch(n): return torch.zeros({size}, 4), torch.zeros({size}).long()")
        refused(task, "make_batch ignores its size", str(size), "batch_size")


def test_samples_of_unequal_size_need_a_collate_fn():
    task = Task(build_model=lambda: nn.Linear(4, 3), train_dataset=lambda: [torch.zeros(i) for i in (4, 5)])
    refused(task, "making a batch of 2 samples of your train_dataset raised RuntimeError", "collate_fn(samples)")


def test_a_loss_that_does_not_depend_on_the_model_is_refused(load):
    text = "other = nn.Linear(4, 3)\ndef training_step(model, batch): return other(batch[0]).mean()"
    refused(load(text), "no parameter of Linear has a gradient", "use its argument")


def test_a_weight_of_nothing_is_refused(load):
    refused(load("def loss_weight(batch): return 0"), "0 terms", "correct loss_weight")
    refused(load("def make_batch(n): return torch.zeros(n, 4), torch.full((n,), -100)"), "0 terms", "make_batch")


@pytest.mark.parametrize("blocks", ["[]", "None", "[nn.Linear(2, 2)]", "model"])
def test_checkpoint_blocks_that_are_not_the_models_are_refused(load, blocks):
    refused(load(f"def checkpoint_blocks(model): return {blocks}"), "checkpoint_blocks returned", "list(model.blocks)")
