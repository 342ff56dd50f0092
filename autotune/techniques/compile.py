"""`torch.compile`: the model's repeated blocks, or the whole model, become fused kernels made for their shapes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.task.adapters import is_lightning, overrides
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Support, Technique, UnsupportedError
from autotune.techniques.block_chains import blocks_of
from autotune.techniques.build import Forward
from autotune.techniques.frameworks import At, Table, Unsaid, words

if TYPE_CHECKING:
    from autotune.task import Task

BACKEND = "inductor"
_GRAPHS = "reduce-overhead"
_SETUP_S = {"default": 90.0, _GRAPHS: 90.0, "max-autotune-no-cudagraphs": 300.0}  # of an unknown model
# of a known model, on one core; 43 s were seen with 7 layers, and, beside other work, 81 to 170 s with 18 to 46
_FIXED_S, _LAYER_S = 20.0, 2.0


class Compile(Technique):
    """`torch.compile` of the repeated blocks, with one compilation for equal blocks, or else of the whole model. Where training does not
    call the model itself, but parts of it, these are compiled.

    Only the instances' `forward` is replaced: classes, parameter names and the state dict stay as they are. Recomputation
    wraps the compiled forward.
    """

    name = "compile"
    summary = "`torch.compile`, block by block where blocks repeat: faster steps after up to minutes of compiling"
    choices = ("off", *_SETUP_S)
    applies = (
        "GPUs from compute capability 7.0; CPUs with a C++ compiler (`default`). "
        "If it takes at most a tenth of the budget, or if included"
    )
    off = "off"
    phase = Phase.MODEL
    reaches_into_step = False  # any step calls a compiled block as it did before
    order = 25  # before checkpoint_segments, so that the compiled block is recomputed
    untraced = "what compiled code keeps for the backward pass is decided when it is compiled"
    likely = ("default",)
    frameworks = words(
        transformers=Table(
            {
                "off": {"torch_compile": False},
                **{mode: {"torch_compile": True, "torch_compile_mode": mode} for mode in _SETUP_S},
            }
        ),
        accelerate=Table({"off": {"dynamo_backend": "no"}, "default": {"dynamo_backend": "inductor"}}),
        loop=Unsaid(),
        torch=Table(
            {
                mode: {
                    At.MODEL: f"compile_forward(model, {mode!r}, {{places}})",
                    **({At.BATCH: "torch.compiler.cudagraph_mark_step_begin()"} if mode == _GRAPHS else {}),
                }
                for mode in _SETUP_S
            }
        ),
    )

    def label(self, choice: Choice) -> str:
        if choice == self.off:
            return "not compiled"
        return "compiled" if choice == "default" else f"compiled ({choice})"

    def conflict(self, config: Config) -> str:
        if config["checkpoint_policy"] != "full":
            return "selective checkpointing looks at single operators, and compiled code has none"
        if config[self.name] == _GRAPHS and config["checkpoint_segments"]:
            # https://github.com/pytorch/pytorch/issues/154306, up to torch 2.13
            return (
                "torch fails to replay a CUDA graph of a block that is recomputed; `default` compiles it without graphs"
            )
        return ""

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Compiled code passes over memory and launches kernels less often; its kernels take memory of their own."""
        return Expectation(
            compute=Factor(typical=0.88, spread=1.2),
            launch=Factor(typical=0.4 if choice == _GRAPHS else 0.7, spread=1.6),
            activations=Factor(typical=0.85, spread=1.25),
            untraced=Factor(spread=3.0),
            setup_s=_SETUP_S[str(choice)],
        )

    def support(self, setting: Setting) -> Support:
        """The modes that the device's compiler has, each optional for the seconds that compiling the model takes."""
        if reason := setting.device.why_not_compiled():
            return Support(choices=("off",), reason=reason)
        possible = tuple(_SETUP_S) if setting.device.capabilities.triton else ("default",)
        try:
            regions = _regions(setting)
        except UnsupportedError as error:
            return Support(choices=("off",), reason=str(error))
        default_s = _FIXED_S + _LAYER_S * _num_layers({_kind(region): region for region in regions}.values())
        setup_s = tuple((choice, default_s * _SETUP_S[choice] / _SETUP_S["default"]) for choice in possible)
        return Support(choices=("off",), optional=possible, reason="compiling takes time", setup_s=setup_s)

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the blocks, or of the model, by a compiled one."""
        try:
            regions = _regions(build, recomputed=bool(build.config["checkpoint_segments"]))
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.name}={choice}: {error}; leave it off") from None
        compile_forward(build.model, str(choice), **build.acting_on(self.name, regions))
        if choice == _GRAPHS:
            build.batch_transforms.append(_begin_step)
            build.unrepeatable = "the CUDA graphs that were being recorded keep the memory that they took"

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the limit of compilations. If Dynamo was not imported before, which takes seconds, there is none to restore."""
        config: Any = sys.modules.get("torch._dynamo.config")
        before = config and config.cache_size_limit
        try:
            yield
        finally:
            if config:
                config.cache_size_limit = before


def compile_forward(model: torch.nn.Module, mode: str, modules: Sequence[str]) -> None:
    """Replace the forward of modules, by their names; equal modules share a compilation."""
    if mode == _GRAPHS:  # gradients lie in the graphs' own memory, which the next micro batch overwrites
        for parameter in {p for name in modules for p in model.get_submodule(name).parameters() if p.requires_grad}:
            parameter.register_hook(torch.clone)
    compiled: dict[Any, Any] = {}
    limits = torch._dynamo.config
    # Blocks that print alike may still differ in what they compute; past the limit they would not be compiled.
    limits.cache_size_limit = max(limits.cache_size_limit, 4 * len(modules))
    for name in modules:
        module: Any = model.get_submodule(name)
        kind = _kind(module)
        if kind not in compiled:
            own = _own_copy(type(module).forward)
            compiled[kind] = torch.compile(own, backend=BACKEND, mode=mode if BACKEND == "inductor" else None)
        module.forward = _Compiled(module, compiled[kind])


@dataclass(eq=False)
class _Compiled(Forward):
    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


def _regions(within: Setting | Build, *, recomputed: bool = False) -> list[torch.nn.Module]:
    """The blocks that repeat or are recomputed, else what training calls; without modules whose forward was replaced already.

    Raises:
        UnsupportedError: there are no such blocks, and training calls no part of the model that has parameters.
    """
    task, model = within.task, within.model
    try:
        blocks = blocks_of(task, model).larger
    except UnsupportedError:
        blocks = []
    repeated = len(set(map(_kind, blocks))) < len(blocks)
    in_pieces = repeated or (blocks and recomputed)
    found = blocks if in_pieces else _called(within)
    return [module for module in found if "forward" not in vars(module)]


def _called(within: Setting | Build) -> list[torch.nn.Module]:
    """The outermost modules that training calls: the model itself, or else parts of it. One without parameters (a loss, a metric) is
    none.
    """
    task, model = within.task, within.model
    if task.takes_whole_steps:  # none can be taken to try it
        entered = {module for module in model.modules() if _has_forward(module)}
    elif _calls_model(task, model):
        entered = {model}
    else:
        entered = set(within.run_order(model.modules()))

    def outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if module in entered:
            yield module
        else:
            for child in module.children():
                yield from outermost(child)

    found = [module for module in dict.fromkeys(outermost(model)) if next(module.parameters(), None) is not None]
    if not found:
        raise UnsupportedError("training calls no part of the model as a module, so that there is nothing to compile")
    return found


def _calls_model(task: Task, model: torch.nn.Module) -> bool:
    """Whether the loss is known to call the model itself: the default losses do, and a step that says so."""
    if task.training_step is None:
        return not is_lightning(model)
    owner: Any = getattr(task.training_step, "__self__", None)
    return _calls_model(owner, model) if isinstance(owner, type(task)) else bool(getattr(owner, "calls_model", False))


def _has_forward(module: torch.nn.Module) -> bool:
    """Whether a module's class says what a call of it computes."""
    cls = type(module)
    return overrides(cls, "forward") if is_lightning(module) else cls.forward is not torch.nn.Module.forward


def _num_layers(modules: Iterable[torch.nn.Module]) -> int:
    """Number of modules without submodules, each of which makes operators for the compiler."""
    return sum(next(part.children(), None) is None for module in modules for part in module.modules())


def _kind(module: torch.nn.Module) -> tuple[str, ...]:
    """A key that is equal for modules that one compilation serves: all that they print, and their parameters' shapes and types."""
    parameters = (f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in module.named_parameters())
    return (f"{type(module).__module__}.{module!r}", *parameters)


def _own_copy(function: Any) -> Any:
    """The function with its own code object, by which the compiler counts and finds what it has compiled.

    Otherwise different blocks would share a small limit of compilations, and blocks beyond it would silently not be compiled.
    """
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _begin_step(batch: Any) -> Any:
    """Tell CUDA graphs that they may overwrite what they returned in the previous step."""
    torch.compiler.cudagraph_mark_step_begin()
    return batch
