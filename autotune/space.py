"""The search space: which configs may be probed."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from autotune.errors import ConfigError
from autotune.records.config import (
    ACCUMULATION,
    ALONE,
    BATCH_KEYS,
    BATCH_SIZE,
    BatchPlan,
    Choice,
    Config,
    World,
)
from autotune.records.inspection import Inspection
from autotune.techniques import Phase, Technique, Techniques
from autotune.techniques.base import Expectation
from autotune.techniques.frameworks import BATCH, FRAMEWORKS, why_unsaid
from autotune.units import plural

# techniques or `accumulation_steps`, each with the choice that replaces the baseline's
Changes = frozenset[tuple[str, Choice]]
EXCLUDED = "excluded"
DECIDED = ", as asked for or because what is tuned decides it itself"
CUT = (ACCUMULATION, 2)  # as a change it stands for more micro steps than the baseline takes, however many


class SpaceExhausted(Exception):
    """No config of the space is left to probe: all were measured or ruled out."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The configs that may be probed.

    Attributes:
        techniques: whose choices these are.
        choices: technique -> choices that are searched, in order; a single choice is fixed. With a global batch,
            accumulation is not among them: it follows from the batch size.
        supported: every supported choice of these techniques, including those left out of this search. A study keeps them,
            since its distributions must not change from one search to the next.
        baseline: always part of the space.
        accumulations: the accumulation steps that may be used.
        fixed: what the user fixed. A baseline that does not keep to it is measured all the same, but is no answer.
        untraceable: technique and choice -> why its memory is learned from probes alone.
        always: technique and choice that act in every config, even where the technique calls them redundant.
        stays_whole: the baseline's micro batch is not cut to make it fit.
        expected_setup_s: technique and choice -> seconds that it is expected to take before the first step here, where the
            inspection knows that better than the technique.
        barred: sets of changes from the baseline, as `changes` has them. A config with all changes of such a set is not probed
            and is no answer.
        world: the processes that train each config together; the global batch is that of all of them.
    """

    techniques: Techniques
    choices: Mapping[str, tuple[Choice, ...]]
    supported: Mapping[str, tuple[Choice, ...]]
    baseline: Config
    global_batch: int | None
    accumulations: frozenset[Choice]
    fixed: Mapping[str, Choice]
    untraceable: Mapping[tuple[str, Choice], str]
    always: frozenset[tuple[str, Choice]] = frozenset()
    stays_whole: bool = False
    expected_setup_s: Mapping[tuple[str, Choice], float] = field(default_factory=dict)
    barred: frozenset[Changes] = frozenset()
    world: World = ALONE

    @property
    def ordered(self) -> frozenset[str]:
        """Names of techniques whose choices are numbers on a scale."""
        return frozenset(filter(self.techniques.is_ordered, self.choices))

    @cached_property
    def _usual(self) -> dict[str, Choice]:
        return {**self.baseline, **{name: options[0] for name, options in self.choices.items() if len(options) == 1}}

    def complete(self, choices: Mapping[str, Choice]) -> Config:
        """Complete a partial config with fixed choices first, then with the baseline's. Accumulation follows from the batch."""
        full = {**self._usual, **choices}
        if self.global_batch is not None:
            plan = BatchPlan.keeping(self.global_batch, int(full[BATCH_SIZE]), self.world)
            full[ACCUMULATION] = plan.accumulation_steps
        return Config(tuple(full.items()))

    def undo(self, config: Config, names: Iterable[str]) -> Config:
        """The config with these keys as in the baseline, and all that does nothing without them."""
        undone = self.complete({**config, **{name: self.baseline[name] for name in names}})
        idle = [technique.name for technique in self._switched if self._is_redundant(technique, undone)]
        return self.complete({**undone, **{name: self.baseline[name] for name in idle}})

    def snap(self, choices: Mapping[str, Choice]) -> Config:
        """The config with these choices as far as the space has them; on a scale the nearest one."""
        found: dict[str, Choice] = {}
        for name, choice in choices.items():
            among = self.choices[name]
            if self.techniques.is_ordered(name) or name == BATCH_SIZE:
                found[name] = min(among, key=lambda one: abs(int(one) - int(choice)))
            elif choice in among:
                found[name] = choice
        return self.complete(found)

    @cached_property
    def _switched(self) -> list[Technique]:
        """The techniques that some config of the space has on."""
        return [t for name, t in self.techniques.items() if any(c != t.off for c in self.choices[name])]

    @cached_property
    def _known(self) -> dict[Config, bool]:
        return {self.baseline: True}

    def contains(self, config: Config) -> bool:
        """Whether a config belongs to the space."""
        if (known := self._known.get(config)) is None:  # a search asks a hundred thousand times
            known = self._known[config] = self._contains(config)
        return known

    def _contains(self, config: Config) -> bool:
        return (
            all(config[name] in choices for name, choices in self.choices.items())
            and config[ACCUMULATION] in self.accumulations
            and config.plan_in(self.world).keeps(self.global_batch)
            and not any(self._is_redundant(technique, config) for technique in self._switched)
            and not any(barred <= self.changes(config) for barred in self.barred)
        )

    def changes(self, config: Config) -> Changes:
        """The techniques that a config switches otherwise than the baseline, and `CUT` where it takes more micro steps."""
        changed = {change for change in config.differences(self.baseline).items() if change[0] not in BATCH_KEYS}
        return frozenset(changed | ({CUT} if config.accumulation_steps > self.baseline.accumulation_steps else set()))

    def barring(self, changes: Changes) -> Space:
        """The space without the configs that have all of these changes."""
        return replace(self, barred=self.barred | {changes})

    def _is_redundant(self, technique: Technique, config: Config) -> bool:
        choice = config[technique.name]
        if choice == technique.off:
            return False
        acts = (technique.name, choice) in self.always
        return bool(technique.conflict(config)) if acts else technique.is_redundant(config)

    def answers(self, config: Config) -> bool:
        """Whether a config belongs to the space and keeps to what the user fixed."""
        return self.contains(config) and all(config[name] == choice for name, choice in self.fixed.items())

    def __iter__(self) -> Iterator[Config]:
        return iter(self._configs)

    @cached_property
    def _configs(self) -> list[Config]:
        """All of them: whoever asks for one of them asks for all, and does so before every probe."""
        combinations = itertools.product(*self.choices.values())
        configs = (self.complete(dict(zip(self.choices, values, strict=True))) for values in combinations)
        return list(filter(self.contains, configs))

    def tracing(self) -> Iterator[Config]:
        """Configs whose traces cover the space: the baseline, each combination of the techniques that shape what is trained, a
        micro batch, or an update, and each batch size. Choices that cannot be traced are left out, and what no way to spread a
        model allows. Other clashes stay: the baseline fills what a combination does not name, and other configs need not have that.
        """
        yield self.baseline
        known = self.techniques.items()
        spreading = [technique for technique in self._switched if technique.phase is Phase.SPREAD]
        trained = [name for name, technique in known if technique.phase is Phase.TASK]
        of_micro_batch = [n for n, technique in known if any(map(technique.shapes_micro_batch, self.choices[n]))]
        of_update = [n for n, technique in known if any(map(technique.shapes_update, self.choices[n]))]
        for names in (trained, of_micro_batch, of_update, [BATCH_SIZE]):
            traced = ([c for c in self.choices[name] if not self.why_untraced(name, c)] for name in names)
            for values in itertools.product(*traced):
                combined = dict(zip(names, values, strict=True))
                alone = self.techniques.complete(combined)
                if not any(self._is_redundant(technique, alone) for technique in spreading):
                    yield self.complete(combined)

    def why_untraced(self, name: str, choice: Choice) -> str:
        """Why the memory of configs with this choice is learned from probes alone; empty where it is traced."""
        return "" if choice == self.baseline[name] else self.untraceable.get((name, choice), "")

    @cached_property
    def _setup_s(self) -> dict[tuple[str, Choice], float]:
        """Seconds that each choice is expected to take before the first step, of those that take any."""
        found = {}
        for name, technique in self.techniques.items():
            for choice in {*self.choices[name], self.baseline[name]} - {technique.off}:
                by_itself = technique.expectation(choice, (technique.off, choice)).setup_s
                found[name, choice] = self.expected_setup_s.get((name, choice), by_itself)
        return {switch: seconds for switch, seconds in found.items() if seconds}

    def expectation(self, technique: Technique, choice: Choice) -> Expectation:
        """What a choice is expected to do in this search, before a probe has shown it."""
        return technique.expectation(choice, self.choices[technique.name])

    def setting_up(self, config: Config) -> frozenset[tuple[str, Choice]]:
        """The choices of a config that take seconds before the first step: configs that share all of them compile alike."""
        return frozenset(switch for switch in self._setup_s if config[switch[0]] == switch[1])

    def setup_s(self, config: Config) -> float:
        """Seconds before the first step that a config's techniques are expected to take, beyond plain training."""
        return sum(self._setup_s[switch] for switch in self.setting_up(config))

    @property
    def num_combinations(self) -> int:
        """How many combinations of choices there are, which is an upper bound on the number of configs."""
        return math.prod(len(choices) for choices in self.in_reach.values())

    def combination(self, number: int) -> Config:
        """One of the combinations of choices, completed. Several may make the same config, or one that the space does not contain."""
        chosen = dict[str, Choice]()
        for name, choices in self.in_reach.items():
            number, place = divmod(number, len(choices))
            chosen[name] = choices[place]
        return self.complete(chosen)

    @cached_property
    def in_reach(self) -> dict[str, tuple[Choice, ...]]:
        """The choices that some config may have; of the batch sizes only those that the accumulation allows."""
        found = dict(self.choices)
        if self.global_batch is not None:
            found[BATCH_SIZE] = tuple(
                size
                for size in found[BATCH_SIZE]
                if self.complete({BATCH_SIZE: size})[ACCUMULATION] in self.accumulations
                or size == self.baseline.batch_size
            )
        return found

    def without(self, name: str, dropped: set[Choice]) -> Space:
        """The space without some choices of a technique."""
        kept = tuple(choice for choice in self.choices[name] if choice not in dropped) or (self.baseline[name],)
        return replace(self, choices={**self.choices, name: kept})

    def said_in(self, frameworks: Sequence[str], optimizer: str) -> Space:
        """The space of the baseline's choices and of those that the arguments of at least one of the frameworks can say.

        Args:
            optimizer: class of the task's optimizer, as in `TaskFacts`.
        """
        choices = dict(self.choices)
        for name, technique in self.techniques.items():
            among = choices[name]
            choices[name] = tuple(
                choice
                for choice in among
                if choice == self.baseline[name] or _is_said(technique, choice, among, frameworks, optimizer)
            )
        return replace(self, choices=choices)

    def with_smaller_baseline(self) -> Space | None:
        """The space with the baseline's batch halved, or at the next divisor of the global batch below that.

        The smaller size joins the sizes that are searched. Where the baseline's was the only one, the smaller one takes its place,
        unless the user fixed the size. None if the batch is one sample already, or must not be cut.
        """
        if self.baseline.batch_size == 1 or self.stays_whole:
            return None
        smaller = self.baseline.halved(self.global_batch, self.world)
        half = smaller.batch_size

        def with_half(choices: Mapping[str, tuple[Choice, ...]]) -> dict[str, tuple[Choice, ...]]:
            sizes = choices.get(BATCH_SIZE, ())
            stays = sizes == (self.baseline.batch_size,) and BATCH_SIZE not in self.fixed
            if stays:  # the only size stays that of the baseline
                return {**choices, BATCH_SIZE: (half,)}
            return {**choices, BATCH_SIZE: tuple(sorted({half, *sizes}))} if len(sizes) > 1 else dict(choices)

        return replace(
            self,
            baseline=smaller,
            choices=with_half(self.choices),
            supported=with_half(self.supported),
            accumulations=self.accumulations | {smaller.accumulation_steps},
        )

    def params(self, config: Config) -> dict[str, Choice]:
        """The config's searched choices, from which `complete` restores the config."""
        return {name: config[name] for name in self.supported}

    def nearest(self, proposal: Mapping[str, Any], admissible: Callable[[Config], bool]) -> Config:
        """The admissible config nearest to a proposal: snap it to the choices, then move one step at a time.

        Raises:
            SpaceExhausted: there is none.
        """
        near = {name: _snap(proposal.get(name, self.baseline[name]), among) for name, among in self.choices.items()}
        start = self.complete(near)
        seen, queue = {start}, deque([start])
        while queue:
            config = queue.popleft()
            if self.contains(config) and admissible(config):
                return config
            new = [neighbour for neighbour in dict.fromkeys(self.neighbours(config)) if neighbour not in seen]
            seen.update(new)
            queue += new
        raise SpaceExhausted

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Configs one step away: the next choice up or down on a scale, any other choice of a category."""
        for name, choices in self.choices.items():
            if config[name] in choices and self.techniques.is_ordered(name):
                index = choices.index(config[name])
                near = choices[max(index - 1, 0) : index] + choices[index + 1 : index + 2]
            else:
                near = tuple(choice for choice in choices if choice != config[name])
            yield from (self.complete({**config, name: choice}) for choice in near)


def require_possible(
    techniques: Techniques,
    fix: Mapping[str, Any],
    include: Iterable[str],
    exclude: Iterable[str],
    frameworks: Iterable[str] = (),
) -> dict[str, Choice]:
    """What is fixed, if it and the other names are possible for some task. This needs no inspection.

    Raises:
        ConfigError: an unknown framework, technique or choice, or contradicting options.
    """
    if unknown := {*frameworks} - {*FRAMEWORKS}:
        raise ConfigError(f"frameworks: {min(unknown)!r} is not known; expected some of {', '.join(FRAMEWORKS)}")
    for name in (*fix, *include, *exclude):
        techniques.known(name)
    if twice := {*exclude} & {*fix, *include}:
        raise ConfigError(f"{min(twice)!r} is both excluded and fixed or included; leave one of the options out")
    return {name: techniques.validate(name, choice) for name, choice in fix.items()}


def build_space(
    inspection: Inspection,
    techniques: Techniques,
    *,
    fix: Mapping[str, Any] = MappingProxyType({}),
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    frameworks: Sequence[str] = (),
) -> tuple[Space, list[str]]:
    """Build the space of a task from the supported choices and from what the user fixed, included and excluded.

    Args:
        frameworks: the space keeps to what the arguments of these can say; empty for everything.

    Returns:
        The space, and notes for the user about what was left out.

    Raises:
        ConfigError: an unknown technique or choice, a choice that is not supported here, or contradicting options.
    """
    fixed = require_possible(techniques, fix, include, exclude)
    world = inspection.known_world
    baseline = techniques.complete(inspection.baseline, global_batch=inspection.global_batch, world=world)
    trained = techniques.trained(baseline)
    choices: dict[str, tuple[Choice, ...]] = {}
    supported: dict[str, tuple[Choice, ...]] = {}
    notes: list[str] = []
    optional_here: list[str] = []
    for name in (*BATCH_KEYS, *techniques):
        support = inspection.support_of(name)
        fights_shortage = name in techniques and techniques[name].against_shortage
        is_asked_for = name in include or (inspection.shortage and fights_shortage)
        optional = support.optional if is_asked_for else ()
        everything = _in_order(techniques, name, (*support.choices, *support.optional, baseline[name]))
        searched = _in_order(techniques, name, (*support.choices, *optional, baseline[name]))
        if name in fixed:
            searched = (_possible(techniques, name, fixed[name], everything, inspection),)
        elif name in exclude:
            searched = (baseline[name],)
        elif support.optional and not is_asked_for and support.reason and _has_words(techniques, name, frameworks):
            others = [f"{name}={choice}" for choice in support.optional if choice not in searched]
            optional_here += [name] if len(searched) == 1 or techniques.is_ordered(name) else others
        elif name in include and len(searched) == 1 and support.reason:
            notes.append(f"{name} has nothing to search here: {support.reason}; leave it out of --include")
        if name in trained:  # each space trains one thing: what else may be trained is ranked beside it
            searched = (baseline[name],)
        choices[name] = searched
        if len(everything) > 1 and len(searched) > 1:
            supported[name] = _as_listed(techniques, name, everything)
    if optional_here:
        notes.append(f"optional here: {', '.join(optional_here)}; --include NAME adds one (`autotune show` says why)")
    space = _space_of(
        inspection, techniques, choices, supported, baseline, fixed, stays_whole=ACCUMULATION not in include
    )
    if frameworks:
        before, space = space.choices, space.said_in(frameworks, inspection.facts.optimizer)
        lost = [name for name in include if name in techniques and len(space.choices[name]) == 1 < len(before[name])]
        notes += [
            f"{name} has nothing to search here: {why_unsaid(frameworks)}; leave it out of include" for name in lost
        ]
    return space, notes


def not_searched(
    inspection: Inspection,
    space: Space,
    *,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    frameworks: Sequence[str] = (),
) -> dict[str, str]:
    """Each key of a config that is not searched, and each whose choices named after `=` are not -> the reason.

    Args:
        include, exclude, frameworks: as in `build_space`, which made the space.
    """
    found = {
        name: reason
        for name, reason in inspection.unsupported.items()
        if name not in space.fixed and (name not in include or len(space.choices.get(name, ())) == 1)
    }
    for name, technique in space.techniques.items():
        support, own = inspection.support_of(name), space.baseline[name]
        everything = _in_order(space.techniques, name, (*support.choices, *support.optional, own))
        others = [choice for choice in everything if choice != own]
        if not others or name in space.fixed or technique.phase is Phase.TASK:
            continue
        if name in exclude:
            found[name] = EXCLUDED + (DECIDED if frameworks else "")
        elif frameworks:
            optimizer = inspection.facts.optimizer
            unsaid = [c for c in others if not _is_said(technique, c, everything, frameworks, optimizer)]
            if unsaid and {*support.optional} <= {*unsaid}:  # to include it would be no use
                found.pop(name, None)
            if unsaid:
                named = name if unsaid == others else f"{name}={', '.join(map(str, unsaid))}"
                found[named] = why_unsaid(frameworks)
    return found


def _is_said(
    technique: Technique, choice: Choice, among: Sequence[Choice], frameworks: Sequence[str], optimizer: str
) -> bool:
    """Whether the arguments of one of the frameworks say a choice; the rest is as in `Technique.write`."""
    return any(technique.write(each, choice, among, optimizer=optimizer) is not None for each in frameworks)


def _space_of(
    inspection: Inspection,
    techniques: Techniques,
    choices: dict[str, tuple[Choice, ...]],
    supported: dict[str, tuple[Choice, ...]],
    baseline: Config,
    fixed: Mapping[str, Choice],
    *,
    stays_whole: bool,
) -> Space:
    """The space of some choices, with what the inspection knows of them.

    Raises:
        ConfigError: no accumulation makes the global batch out of the batch size that was fixed.
    """
    accumulations = frozenset(choices[ACCUMULATION])
    if inspection.global_batch is not None:  # accumulation follows from the batch size
        del choices[ACCUMULATION]
        supported.pop(ACCUMULATION, None)
        size = fixed.get(BATCH_SIZE)
        plan = size and BatchPlan.keeping(inspection.global_batch, int(size), inspection.known_world)
        steps = plan and plan.accumulation_steps
        if steps and steps not in accumulations:
            raise ConfigError(
                f"batch_size={size} takes accumulation_steps={steps}, which is not searched: "
                f"{inspection.batch.reason or 'it is fixed to another'}; fix a larger batch_size, or add "
                f"--include {ACCUMULATION}"
            )
    support_of = inspection.support.items()
    return Space(
        techniques=techniques,
        choices=choices,
        supported=supported,
        baseline=baseline,
        global_batch=inspection.global_batch,
        world=inspection.known_world,
        accumulations=accumulations,
        fixed=fixed,
        untraceable={(name, choice): reason for name, found in support_of for choice, reason in found.untraceable},
        stays_whole=inspection.batch.stays_whole and stays_whole,
        always=frozenset((name, choice) for name, found in support_of for choice in found.always),
        expected_setup_s={(name, choice): seconds for name, found in support_of for choice, seconds in found.setup_s},
    )


def _has_words(techniques: Techniques, name: str, frameworks: Sequence[str]) -> bool:
    """Whether one of some frameworks has words for a technique or a key of the batch plan; True where none is given."""
    words = BATCH[name] if name in BATCH else techniques[name].frameworks
    return not frameworks or any(framework in words for framework in frameworks)


def trained_beside(
    inspection: Inspection,
    techniques: Techniques,
    *,
    fix: Mapping[str, Any],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> list[dict[str, Choice]]:
    """What may be trained instead of what the baseline trains: one choice changed at a time, each for a space of its own."""
    found = []
    own = techniques.trained(inspection.baseline)
    for name in own:
        if name in fix or name in exclude:
            continue
        support = inspection.support_of(name)
        offered = (*support.choices, *(support.optional if name in include else ()))
        found += [{name: choice} for choice in dict.fromkeys(offered) if choice != own[name]]
    return found


def _as_listed(techniques: Techniques, name: str, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Choices in the order of the technique: a study keeps it, and which of them are optional depends on the budget and the machine."""
    listed = techniques[name].choices if name in techniques else ()
    return tuple(sorted(choices, key=lambda choice: listed.index(choice) if choice in listed else len(listed)))


def _in_order(techniques: Techniques, name: str, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    unique = tuple(dict.fromkeys(choices))
    return tuple(sorted(unique)) if techniques.is_ordered(name) else unique


def _possible(
    techniques: Techniques, name: str, choice: Choice, supported: tuple[Choice, ...], inspection: Inspection
) -> Choice:
    """The choice that the user fixed.

    A batch size need not be among those searched, as long as the global batch and the dataset allow it.

    Raises:
        ConfigError: it is not supported for this task on this device.
    """
    if name == BATCH_SIZE:
        techniques.complete({name: choice}, global_batch=inspection.global_batch, world=inspection.known_world)
        dataset_size = inspection.facts.dataset_size
        if dataset_size is not None and int(choice) > dataset_size:
            raise ConfigError(
                f"batch_size={choice} is more than the training set's {plural(dataset_size, 'sample')}; fix a smaller one"
            )
    elif choice not in supported:
        reason = inspection.support_of(name).reason
        because = f": {reason}" if reason else ""
        derived = name == ACCUMULATION and inspection.global_batch is not None
        follows = "follows from the global batch and " if derived else ""
        listed = ", ".join(str(option) for option in supported[:20])
        raise ConfigError(
            f"{name}={choice} {follows}is not supported for this task on this device{because}; supported: {listed}"
        )
    return choice


def _snap(value: Any, choices: tuple[Choice, ...]) -> Choice:
    if value in choices or isinstance(value, str | bool):
        return value if value in choices else choices[0]
    return min(choices, key=lambda choice: abs(math.log1p(int(choice)) - math.log1p(value)))
