"""Where and how the optimizer keeps its state: in 8 or 4 bits a value, or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Support, Technique, UnsupportedError
from autotune.techniques.frameworks import At, Lines, Table, words

if TYPE_CHECKING:
    from autotune.devices.base import Device
TORCHAO_MISSING = "torchao is not installed; `pip install 'autotune-torch[lean]'` installs it"
_COMPILING_S = 90.0  # torchao compiles its step for each shape of a parameter: 18 s were seen for one on a CPU


class OptimizerState(Technique):
    """The task's own optimizer takes its steps by torchao's low-bit Adam or AdamW, or on host copies of its parameters.

    Optimizer object, hooks and parameter groups (whose learning rate a scheduler sets) stay as they are. torchao does not shorten
    the state of parameters with fewer than 4096 values, and rounds parameters in bf16 stochastically.
    """

    name = "optimizer_state"
    summary = "Adam's state in 2 or 1 bytes a parameter in place of 8; or any in host memory, with the update there"
    choices = ("default", "8bit", "4bit", "cpu")
    applies = (
        "if included: torch's `Adam` and `AdamW` with torchao (extra `lean`); `cpu`: torch's own optimizers on a GPU"
    )
    off = "default"
    phase = Phase.OPTIMIZER
    order = 30  # last, since it replaces the step
    leanest = ("cpu", "4bit", "8bit")
    exact = False
    keeps_random_masks = True
    likely = ("8bit", "cpu")
    said_of = "AdamW"
    frameworks = words(
        transformers=Table({"8bit": {"optim": "adamw_torch_8bit"}, "4bit": {"optim": "adamw_torch_4bit"}}),
        torch=Lines({At.OPTIMIZER: "keep_state(optimizer, {choice})"}),
    )

    def conflict(self, config: Config) -> str:
        other = config[self.name] in ("8bit", "4bit") and config["optimizer_impl"] != "default"
        return "torchao's steps have one implementation: leave optimizer_impl at its default" if other else ""

    def label(self, choice: Choice) -> str:
        return "optimizer on the CPU" if choice == "cpu" else f"{choice} optimizer state"

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """A parameter with its gradient and Adam's state takes 16 bytes in fp32, 8 of them for the state; SGD's state has 4 or none.

        On a CPU the compiler's own memory counts, too: about 200 MiB were seen.
        """
        on_host = choice == "cpu"
        return Expectation(
            compute=Factor(spread=1.03),
            update=Factor(typical=10.0 if on_host else 1.2, spread=3.0 if on_host else 1.8),
            state=Factor(typical={"8bit": 0.63, "4bit": 0.57}.get(str(choice), 0.5), spread=1.2),
            untraced=Factor(spread=1.5 if on_host else 3.0),
            setup_s=0.0 if on_host else _COMPILING_S,
        )

    def untraceable(self, choice: Choice, device_kind: str) -> str:
        """A trace covers one device, and no compiled code."""
        what = "state on the host" if choice == "cpu" else "what torchao's compiled step holds"
        return f"{what} is not traced"

    def support(self, setting: Setting) -> Support:
        """The choices that the optimizer, the device and the installed packages allow; all only if included."""
        low_bit, on_host = _why_not_low_bit(setting.optimizer, setting.device), _why_not_on_host(setting.optimizer)
        if not low_bit and any(getattr(module, "sparse", False) is True for module in setting.model.modules()):
            low_bit = "torchao takes no sparse gradients, which an embedding of the model makes"
        if not setting.device.capabilities.own_memory:
            on_host = "the model trains on the CPU already"
        possible = (*(() if low_bit else ("8bit", "4bit")), *(() if on_host else ("cpu",)))
        reasons = [f"{choices}: {why}" for choices, why in (("8bit, 4bit", low_bit), ("cpu", on_host)) if why]
        if possible:
            reasons.insert(0, "short states round, and a step on the host waits for copies")
        return Support(
            choices=(self.off,),
            optional=possible,
            reason="; ".join(reasons),
            note="8bit and 4bit round what the optimizer remembers: compare validation results before you use them",
        )

    def apply(self, build: Build, choice: Choice) -> None:
        """Let the optimizer step in the chosen way; its first step creates the state."""
        optimizer = build.optimizer
        reason = _why_not_on_host(optimizer) if choice == "cpu" else _why_not_low_bit(optimizer, build.device)
        if reason:
            raise UnsupportedError(f"optimizer_state={choice}: {reason}")
        keep_state(optimizer, str(choice))


def keep_state(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Let an optimizer keep its state on the host (`cpu`), or in `8bit` or `4bit`, from its first step on."""
    from autotune.techniques.tensors.copies import CopySteps, take_steps_by

    take_steps_by(optimizer, CopySteps(torch.device("cpu")) if where == "cpu" else _low_bit_steps(optimizer, where))


def torchao(module: str) -> Any:
    """A module of torchao.

    Raises:
        UnsupportedError: the installed release does not work with this torch, which pip does not check.
    """
    try:
        return import_module(f"torchao.{module}")
    except Exception as error:
        both = f"torchao {metadata.version('torchao')} does not work with torch {metadata.version('torch')}"
        raise UnsupportedError(f"{both} ({type(error).__name__}: {error}); install another release of it") from error


def _low_bit_steps(optimizer: torch.optim.Optimizer, choice: str) -> Callable[[torch.optim.Optimizer], None]:
    """A function that takes steps of torchao's optimizer with the groups and the state of `optimizer`."""
    decouples = optimizer.defaults.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    kind = getattr(torchao("optim"), f"Adam{'W' if decouples else ''}{choice}")
    lean = kind([dict(group) for group in optimizer.param_groups], bf16_stochastic_round=True)

    def update(own: torch.optim.Optimizer) -> None:
        lean.state = own.state
        # it takes the learning rate as a tensor, so that another rate needs no new compilation
        lean.param_groups = [
            {**group, "lr": torch.as_tensor(group["lr"], dtype=torch.float32)} for group in own.param_groups
        ]
        lean.step()

    return update


def _why_not_low_bit(optimizer: torch.optim.Optimizer, device: Device) -> str:
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return f"torchao has Adam and AdamW in so few bits, the task's optimizer is {kind.__name__}"
    for option in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return f"torchao's optimizers do not take {option}=True"
    return TORCHAO_MISSING if find_spec("torchao") is None else device.why_not_compiled()


def _why_not_on_host(optimizer: torch.optim.Optimizer) -> str:
    from autotune.techniques.tensors.copies import why_not_apart

    if any(group.get("capturable") for group in optimizer.param_groups):
        return "an optimizer with capturable=True steps on a GPU"
    return why_not_apart(optimizer)
