"""The search space: which configs belong to it and how a proposal becomes one of them."""

from dataclasses import replace

import pytest

from autotune.errors import ConfigError
from autotune.prediction.traces import plan_traces
from autotune.records.config import World
from autotune.records.inspection import BatchSupport, Support
from autotune.space import SpaceExhausted, build_space, not_searched
from autotune.study.trials import distributions_of
from autotune.techniques import find_techniques
from tests.closed_form import SIZES, inspection
from tests.integrations.answers import FACTS

techniques = find_techniques()

# with batch normalisation accumulating more than a baseline of 12 x 8 is optional
NORMALISED = BatchSupport(
    sizes=SIZES, accumulation_steps=SIZES[:6], optional_accumulation_steps=SIZES[6:], reason="BatchNorm"
)


def space_of(*, fix=None, include=(), exclude=(), **changes):
    return build_space(inspection(**changes), find_techniques(), fix=fix or {}, include=include, exclude=exclude)[0]


def support_with(**changes):
    return inspection().support | changes


def test_every_config_keeps_the_global_batch():
    assert {config.samples_per_step for config in space_of()} == {96}


def test_what_does_nothing_without_an_undone_change_is_undone_with_it():
    loading = {
        name: Support(choices=choices) for name, choices in {"num_workers": (0, 2), "prefetch_factor": (2, 8)}.items()
    }
    space = space_of(support=support_with(**loading))
    config = space.complete({"amp": "bf16", "num_workers": 2, "prefetch_factor": 8})
    assert space.undo(config, ["num_workers"]) == space.complete({"amp": "bf16"})
    assert space.undo(config, ["amp", "prefetch_factor"]) == space.complete({"num_workers": 2})


def test_the_space_holds_every_combination_once():
    configs = list(space_of())
    assert len(configs) == len(set(configs)) == 12 * 3 * 5 * 2


def test_the_combinations_of_choices_are_numbered():
    space = space_of()
    found = [space.combination(number) for number in range(space.num_combinations)]
    assert set(filter(space.contains, found)) == set(space)


def test_what_does_not_apply_is_not_searched():
    assert "channels_last" not in distributions_of(space_of())


def test_a_fixed_technique_has_its_choice_alone():
    assert {config["amp"] for config in space_of(fix={"amp": "bf16"}) if config != space_of().baseline} == {"bf16"}


def test_an_excluded_technique_stays_as_in_the_baseline():
    assert {config["amp"] for config in space_of(exclude=("amp",))} == {"off"}


def test_what_a_framework_has_no_words_for_is_left_as_in_the_baseline():
    """Hugging Face models checkpoint every block or none, and `optim` names an AdamW."""
    space = space_of()
    said = space.said_in(("transformers",), "AdamW").choices
    assert said["checkpoint_segments"] == (0, 6) and said["optimizer_impl"] == ("default", "fused")
    assert said["batch_size"] == space.choices["batch_size"] and said["amp"] == space.choices["amp"]
    assert space.said_in(("transformers",), "SGD").choices["optimizer_impl"] == ("default",)
    assert space.said_in(("lightning", "dataloader"), "AdamW").choices["checkpoint_segments"] == (0,)


WHOLE = BatchSupport(
    sizes=SIZES, accumulation_steps=(1,), optional_accumulation_steps=SIZES[1:], reason="coupled", stays_whole=True
)


def test_a_batch_that_must_stay_whole_is_neither_cut_nor_halved_to_fit():
    whole = {"baseline": techniques.complete({"batch_size": 96}).as_dict(), "batch": WHOLE}
    assert {config.batch_size for config in space_of(**whole)} == {96}
    assert space_of(**whole).with_smaller_baseline() is None
    included = space_of(include=("accumulation_steps",), **whole)
    assert {config.batch_size for config in included} == {*SIZES}
    assert included.with_smaller_baseline() is not None


def test_a_batch_that_must_stay_whole_is_cut_by_whoever_includes_that_and_not_by_fixing_a_size():
    whole = {"baseline": techniques.complete({"batch_size": 96}).as_dict(), "batch": WHOLE, "fix": {"batch_size": 24}}
    with pytest.raises(ConfigError, match=r"coupled.*--include accumulation_steps"):
        space_of(**whole)
    included = space_of(include=("accumulation_steps",), **whole)
    assert {config.batch_size for config in included if included.answers(config)} == {24}


def test_a_batch_that_nobody_stated_and_that_stays_moves_with_the_baseline():
    plain = techniques.complete({"batch_size": 32}).as_dict()
    batch = BatchSupport(sizes=(32,), optional_sizes=SIZES)
    space = space_of(baseline=plain, global_batch=None, batch=batch)
    assert {config.batch_size for config in space} == {32}
    smaller = space.with_smaller_baseline()
    assert smaller is not None and {config.batch_size for config in smaller} == {16}
    included = space_of(baseline=plain, global_batch=None, batch=batch, include=("batch_size",))
    assert {config.batch_size for config in included} == {32, *SIZES}


def test_the_baseline_belongs_to_the_space_whatever_is_fixed():
    space = space_of(fix={"amp": "bf16"})
    assert space.contains(space.baseline)


def test_fixing_the_accumulation_restricts_the_batch_size():
    space = space_of(fix={"accumulation_steps": 6})
    assert {config.batch_size for config in space} == {16, 4}  # 4 is the baseline
    assert space.in_reach["batch_size"] == (4, 16) and space.num_combinations < space_of().num_combinations


def test_optional_choices_need_to_be_included():
    support = support_with(amp=Support(choices=("off", "bf16"), optional=("fp16",)))
    assert "fp16" not in {config["amp"] for config in space_of(support=support)}
    assert "fp16" in {config["amp"] for config in space_of(support=support, include=("amp",))}


def test_what_saves_memory_without_changing_results_is_searched_where_plain_training_does_not_fit():
    support = support_with(
        loss_chunks=Support(choices=(False,), optional=(True,), reason="no time"),
        param_dtype=Support(choices=("fp32",), optional=("bf16",), reason="rounds"),
    )
    short = space_of(support=support, shortage="an allocation of 2.00 GiB failed")
    assert {config["loss_chunks"] for config in short} == {False, True}
    assert {config["param_dtype"] for config in short} == {"fp32"}
    assert {config["loss_chunks"] for config in space_of(support=support)} == {False}
    assert {
        config["loss_chunks"] for config in space_of(support=support, shortage="2 GiB", exclude=("loss_chunks",))
    } == {False}


def test_accumulating_more_than_the_baseline_is_left_out_when_it_is_optional():
    baseline = techniques.complete({"batch_size": 12}, global_batch=96).as_dict()
    kept = space_of(batch=NORMALISED, baseline=baseline)
    assert max(config.accumulation_steps for config in kept) == 8
    included = space_of(batch=NORMALISED, baseline=baseline, include=("accumulation_steps",))
    assert max(config.accumulation_steps for config in included) == 96


def test_what_was_asked_for_and_cannot_be_searched_is_told_with_the_reason():
    support = support_with(amp=Support(choices=("off",), reason="a step in it would hardly end here"))
    _, notes = build_space(inspection(support=support), find_techniques(), include=("amp",), exclude=())
    assert "amp has nothing to search here: a step in it would hardly end here; leave it out of --include" in notes


def test_what_is_left_out_is_told_with_the_way_to_include_it():
    found = inspection(
        batch=NORMALISED, support=support_with(amp=Support(choices=("off",), optional=("bf16",), reason="slow"))
    )
    _, notes = build_space(found, find_techniques())
    assert [note for note in notes if "accumulation_steps, amp; --include NAME" in note]
    more = inspection(support=support_with(amp=Support(choices=("off", "bf16"), optional=("fp16",), reason="slow")))
    assert [note for note in build_space(more, find_techniques())[1] if "here: amp=fp16; --include" in note]
    assert {"accumulation_steps": "BatchNorm", "amp": "slow"}.items() <= found.unsupported.items()
    loops = build_space(found, find_techniques(), frameworks=("loop", "dataloader"))[1]
    assert [note for note in loops if "optional here: amp; --include" in note], "a loop cannot be told to accumulate"


def test_what_is_not_searched_has_its_reason_whatever_it_is():
    """By the device or the model, as optional, as excluded, and in an integration because the framework has no words for it."""
    support = support_with(
        amp=Support(choices=("off", "bf16"), optional=("fp16",), reason="slow"),
        attention=Support(choices=("default", "math")),
        compile=Support(
            choices=("off",), optional=("default",), reason="compiling takes time; --include compile tries it"
        ),
        checkpoint_segments=Support(choices=(0, 1, 2)),
    )
    found = inspection(support=support, facts=FACTS)

    def listed(frameworks=(), **options):
        space, _ = build_space(found, find_techniques(), frameworks=frameworks, **options)
        reasons = not_searched(found, space, frameworks=frameworks, **options)
        return {name: why for name, why in reasons.items() if why != "not here"}

    optional = {"amp": "slow", "compile": "compiling takes time; --include compile tries it"}
    assert listed() == optional
    assert listed(include=("compile",)) == {"amp": "slow"}
    assert listed(exclude=("attention",)) == {**optional, "attention": "excluded"}
    unsaid = "no argument of TrainingArguments says it"
    assert listed(("transformers",)) == {**optional, "attention": unsaid, "checkpoint_segments=1": unsaid}
    by_lightning = listed(("lightning", "dataloader"), exclude=("amp",), include=("compile",))
    unsaid = "no argument of Lightning's Trainer or DataLoader says it"
    assert by_lightning.pop("amp").startswith("excluded, as asked for or because what is tuned decides it")
    assert by_lightning == dict.fromkeys(("attention", "compile", "checkpoint_segments", "optimizer_impl"), unsaid)
    by_loop = listed(("loop", "dataloader"))
    assert by_loop.pop("amp=fp16") == "no argument of DataLoader says it, and it takes another training loop"
    assert by_loop == {"compile": optional["compile"]}, "the rest acts on the model and the optimizer themselves"


def test_what_was_asked_for_and_no_argument_says_is_told():
    found = inspection(support=support_with(attention=Support(choices=("default",), optional=("math",), reason="slow")))
    options = {"include": ("attention",), "frameworks": ("lightning", "dataloader")}
    _, notes = build_space(found, find_techniques(), **options)
    assert (
        "attention has nothing to search here: no argument of Lightning's Trainer or DataLoader says it; leave it out of include"
        in notes
    )


def test_redundant_combinations_are_left_out():
    support = support_with(num_workers=Support(choices=(0, 1)), prefetch_factor=Support(choices=(2, 4)))
    configs = list(space_of(support=support))
    assert not [config for config in configs if config["num_workers"] == 0 and config["prefetch_factor"] == 4]


def test_a_proposal_goes_to_the_nearest_config():
    config = space_of().nearest({"batch_size": 14, "amp": "bf16", "checkpoint_segments": 4}, lambda config: True)
    assert (config.batch_size, config["amp"], config["checkpoint_segments"]) in {(12, "bf16", 3), (16, "bf16", 3)}


def test_a_proposal_that_is_ruled_out_goes_to_a_neighbour():
    space = space_of()
    first = space.nearest({"batch_size": 16, "amp": "bf16"}, lambda config: True)
    second = space.nearest({"batch_size": 16, "amp": "bf16"}, lambda config: config != first)
    differing = [name for name in second.differences(first) if name != "accumulation_steps"]
    assert len(differing) == 1


def test_an_exhausted_space_says_so():
    with pytest.raises(SpaceExhausted):
        space_of().nearest({}, lambda config: False)


def test_a_choice_that_is_not_supported_here_is_refused_with_the_reason():
    support = support_with(amp=Support(choices=("off",), reason="the processor has no bf16"))
    with pytest.raises(ConfigError, match="no bf16"):
        space_of(support=support, fix={"amp": "bf16"})


def test_a_technique_cannot_be_fixed_and_excluded():
    with pytest.raises(ConfigError, match="amp"):
        space_of(fix={"amp": "bf16"}, exclude=("amp",))


def test_without_a_global_batch_nothing_accumulates():
    batch = BatchSupport(sizes=SIZES)
    baseline = techniques.complete({"batch_size": 32}).as_dict()
    assert {c.accumulation_steps for c in space_of(batch=batch, global_batch=None, baseline=baseline)} == {1}


def test_any_batch_size_that_divides_the_global_batch_may_be_fixed():
    batch = BatchSupport(sizes=(1, 2, 4), accumulation_steps=SIZES)
    assert {c.batch_size for c in space_of(batch=batch, fix={"batch_size": 32})} == {32}
    with pytest.raises(ConfigError, match="divide"):
        space_of(fix={"batch_size": 37})


def test_what_is_traced_is_the_baseline_and_every_combination_that_shapes_memory():
    space = space_of(fix={"amp": "bf16", "batch_size": 16})
    configs = list(space.tracing())
    assert configs[0] == space.baseline
    traced = {(config["amp"], config["checkpoint_segments"], config["optimizer_impl"]) for config in configs[1:]}
    default, blocks = space.baseline["optimizer_impl"], space.choices["checkpoint_segments"]
    assert traced == {("bf16", segments, default) for segments in blocks} | {
        ("bf16", 0, implementation) for implementation in space.choices["optimizer_impl"]
    }
    assert {config.batch_size for config in configs} == {16, space.baseline.batch_size}


def test_what_cannot_be_traced_is_left_out_of_it():
    support = support_with(amp=Support(choices=("off", "bf16", "fp16"), untraceable=(("fp16", "emulated"),)))
    space = space_of(support=support)
    assert {config["amp"] for config in space.tracing()} == {"off", "bf16"}
    assert space.why_untraced("amp", "fp16") == "emulated"


@pytest.mark.parametrize("fix", [{}, {"prefetch_factor": 4}])
def test_the_passes_of_every_config_are_traced(fix: dict[str, int]) -> None:
    """Also those that clash with the baseline, which accumulates and loads without workers."""
    support = support_with(
        optimizer_in_backward=Support(choices=(False, True)),
        num_workers=Support(choices=(0, 2)),
        prefetch_factor=Support(choices=(2, 4)),
    )
    baseline = techniques.complete({"batch_size": 12}, global_batch=96).as_dict()
    space = space_of(support=support, baseline=baseline, fix=fix)
    plan = plan_traces(space.tracing(), techniques)
    configs = list(space)
    assert len(configs) > 100 and baseline["accumulation_steps"] == 8
    assert {techniques.micro_batch_group(config) for config in configs} <= {*plan.models}
    assert {techniques.update_group(config) for config in configs} <= {*plan.updates}


def test_a_baseline_that_is_halved_takes_the_space_with_it():
    batch = replace(NORMALISED, sizes=(8, 12, 24, 96))
    baseline = techniques.complete({"batch_size": 12}, global_batch=96).as_dict()
    halved = space_of(batch=batch, baseline=baseline).with_smaller_baseline()
    assert (halved.baseline.batch_size, halved.baseline.accumulation_steps) == (6, 16)
    assert {config["amp"] for config in halved if config.batch_size == 6} == {"off", "bf16", "fp16"}
    assert distributions_of(halved)["batch_size"].low == 6


def test_a_fixed_batch_stays_when_the_baseline_is_halved():
    halved = space_of(fix={"batch_size": 8}).with_smaller_baseline()
    assert {config.batch_size for config in halved if config != halved.baseline} == {8}


def test_a_batch_that_would_accumulate_more_than_the_model_allows_cannot_be_fixed():
    baseline = techniques.complete({"batch_size": 12}, global_batch=96).as_dict()
    with pytest.raises(ConfigError, match=r"accumulation_steps=24, .*BatchNorm"):
        space_of(batch=NORMALISED, baseline=baseline, fix={"batch_size": 4})
    included = space_of(batch=NORMALISED, baseline=baseline, fix={"batch_size": 4}, include=("accumulation_steps",))
    assert {config.accumulation_steps for config in included} == {24}


def test_a_fixed_batch_size_is_one_processs_share_of_the_global_batch() -> None:
    baseline = {"batch_size": 4, "accumulation_steps": 6}
    found = inspection(world=World(size=4), baseline=baseline, batch=NORMALISED)
    space, _ = build_space(found, techniques, fix={"batch_size": 4})
    assert {config.accumulation_steps for config in space} == {6}
