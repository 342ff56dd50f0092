"""Which kernel computes attention: torch's own choice among its fused kernels, or another one that is to be preferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autotune.devices import capabilities_of
from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Support, Technique
from autotune.techniques.frameworks import At, Table, Unsaid, words

_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
# process-wide switches of torch.backends.cuda
_SWITCHES = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp"}
# the least compute capability of torch's fused kernels in short types (sdp_utils.cpp)
_CAPABILITY = {"flash": (8, 0), "efficient": (5, 0), "cudnn": (8, 0)}


class Attention(Technique):
    """The kernel of `scaled_dot_product_attention`, for the whole process, and a Hugging Face model's `attn_implementation`.

    A kernel is preferred, not prescribed: where it cannot be used (a mask, a type), torch takes the next one. The settings are
    process-wide, not a context around the forward pass, because recomputation in the backward pass must use them, too.
    """

    name = "attention"
    summary = "which kernel computes attention; `sdpa` in place of a model's own softmax of all scores"
    choices = ("default", "sdpa", *_BACKENDS, "math")
    applies = (
        "`sdpa`: Hugging Face models with eager attention; kernels: `scaled_dot_product_attention` on GPUs "
        "(on CPUs, and `math`: if included)"
    )
    off = "default"
    phase = Phase.MODEL
    order = 5
    likely = ("sdpa",)
    frameworks = words(
        loop=Unsaid(),
        torch=Table(
            {
                "sdpa": {At.MODEL: "use_implementation(model, {places})"},
                "math": {At.STEP: "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"},
                **{kernel: {At.MODEL: f"prefer_kernel({kernel!r}, DEVICE)"} for kernel in _BACKENDS},
            }
        ),
    )

    def label(self, choice: Choice) -> str:
        return f"{choice} attention"

    def is_redundant(self, config: Config) -> bool:
        """In fp32 a GPU has only one fused kernel, which torch takes anyway; `support` notices models that use a short type themselves."""
        in_fp32 = config["amp"] == "off" and config["param_dtype"] == config["shard_dtype"] == "fp32"
        return config[self.name] in _BACKENDS and in_fp32

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Fused kernels differ little from each other; without one the scores of all pairs are written, read and kept."""
        if choice == "sdpa":
            return Expectation(compute=Factor(typical=0.88, spread=1.2), activations=Factor(typical=0.75, spread=1.4))
        if choice == "math":
            return Expectation(compute=Factor(typical=1.2, spread=1.4), activations=Factor(typical=1.4, spread=1.5))
        return Expectation(compute=Factor(spread=1.1), activations=Factor(spread=1.03), untraced=Factor(spread=1.2))

    def traced_as(self, choice: Choice) -> Choice:
        """All fused kernels keep the same tensors: their result and a number for each row of scores."""
        return self.off if choice in _BACKENDS else choice

    def untraceable(self, choice: Choice, device_kind: str) -> str:
        """A trace for a GPU shows the fused kernels only."""
        stands_for_fused = choice == "math" and capabilities_of(device_kind).attention_kernels
        return "what attention without a fused kernel keeps on a GPU is not traced" if stands_for_fused else ""

    def support(self, setting: Setting) -> Support:
        """`sdpa` for Hugging Face models with eager attention; on GPUs the kernels that some call of the model can use."""
        if eager := _eager(setting.model):
            named = [(module, _eager_names(module)) for module in eager]
            for implementation in ("sdpa", "eager"):  # raises where the model has no such implementation
                for module, names in named:
                    module.set_attn_implementation(dict.fromkeys(names, implementation))
            return Support(choices=("default", "sdpa"))
        calls = _calls(setting)
        if not calls:
            return Support(choices=("default",), reason="the model does not call scaled_dot_product_attention")
        if not setting.device.capabilities.attention_kernels:
            reason = "on a CPU torch takes its fused kernel wherever it can, which is seldom slower than its plain one"
            return Support(choices=("default",), optional=("math",), reason=reason)
        capability = setting.device.info().capability
        masked, short = zip(*calls, strict=True)
        refused = {kernel: _refusal(kernel, capability, all(masked)) for kernel in _BACKENDS}
        usable = tuple(kernel for kernel, why in refused.items() if not why)
        refused["math"] = "it keeps the scores of all pairs, and is slower"
        return Support(
            choices=("default", *usable),
            optional=("math",),
            reason="; ".join(f"{kernel}: {why}" for kernel, why in refused.items() if why),
            always=usable if any(short) else (),
        )

    def apply(self, build: Build, choice: Choice) -> None:
        """Set the process's preference, or the model's implementation."""
        if choice == "sdpa":
            use_implementation(build.model, **build.acting_on(self.name, _eager(build.model)))
        elif choice == "math":
            for kernel in _SWITCHES:
                _switch(kernel, False)
        else:
            prefer_kernel(str(choice), build.device.torch_device)

    def is_process_wide(self, choice: Choice) -> bool:
        """`sdpa` changes the model alone."""
        return choice != "sdpa"

    @contextmanager
    def restored(self) -> Iterator[None]:
        order = torch._C._get_sdp_priority_order()
        enabled = {kernel: getattr(torch.backends.cuda, f"{switch}_enabled")() for kernel, switch in _SWITCHES.items()}
        try:
            yield
        finally:
            torch._C._set_sdp_priority_order(order)
            for kernel, on in enabled.items():
                _switch(kernel, on)


def _eager(model: torch.nn.Module) -> list[Any]:
    """The Hugging Face models in `model`, itself included, whose attention is the eager implementation."""

    def is_eager(module: Any) -> bool:
        config = getattr(module, "config", None)
        return hasattr(module, "set_attn_implementation") and getattr(config, "_attn_implementation", "") == "eager"

    return list(filter(is_eager, model.modules()))


def _eager_names(module: Any) -> list[str]:
    """By which `set_attn_implementation` knows a model's own config and, of those in it, the eager ones: a part that is no Hugging Face
    model by itself has a config alone. Models inside may have another implementation, which stays.
    """
    inside = ((name, getattr(module.config, name, None)) for name in getattr(module.config, "sub_configs", ()))
    return ["", *(name for name, config in inside if getattr(config, "_attn_implementation", "") == "eager")]


def use_implementation(model: torch.nn.Module, modules: Sequence[str]) -> None:
    """Let Hugging Face models, by their names in `model`, call `scaled_dot_product_attention`."""
    for name in modules:
        module: Any = model.get_submodule(name)
        module.set_attn_implementation(dict.fromkeys(_eager_names(module), "sdpa"))


def prefer_kernel(kernel: str, device: torch.device) -> None:
    """Let torch try that kernel of `scaled_dot_product_attention` first, and then the others in its own order."""
    first = _number(kernel)
    torch._C._set_sdp_priority_order([first, *(number for number in _settled_order(device) if number != first)])
    _switch(kernel, True)


def _calls(setting: Setting) -> list[tuple[bool, bool]]:
    """The calls of `scaled_dot_product_attention` in a forward pass of the task's plain model.

    Returns:
        For each call, whether it has a mask, and whether it computes in a short type.
    """
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    found: list[tuple[bool, bool]] = []

    def note(query: torch.Tensor, masked: bool) -> None:
        short = query.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(query.device.type)
        found.append((masked, short))

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is functional.scaled_dot_product_attention:
                mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
                note(args[0] if args else kwargs["query"], mask is not None)
            elif function is functional.multi_head_attention_forward and not kwargs.get("need_weights", True):
                # this function calls attention itself, where the mode does not see it, and drops a causal mask
                mask = None if kwargs.get("is_causal") else kwargs.get("attn_mask")
                query = args[0] if args else kwargs["query"]
                note(query, mask is not None or kwargs.get("key_padding_mask") is not None)
            return function(*args, **kwargs)

    with Watch():
        setting.task.loss(setting.model, setting.fresh_batch())
    return found


def _refusal(name: str, capability: tuple[int, int], all_masked: bool) -> str:
    """Why a kernel is not worth preferring; empty where it is."""
    least = _CAPABILITY[name]
    if capability < least:
        return f"it needs compute capability {least[0]}.{least[1]}, this GPU has {capability[0]}.{capability[1]}"
    if name == "flash" and all_masked:
        return "it takes no mask, and every call of the model has one"
    if _number(name) == torch._C._get_sdp_priority_order()[0]:
        return "torch prefers it anyway"
    return ""


def _settled_order(device: torch.device) -> list[int]:
    """The order in which torch tries the kernels. Its first choice on a GPU may put cuDNN first, so one is made before asking."""
    one = torch.empty(1, 1, 1, 8, device=device)
    torch._fused_sdp_choice(one, one, one)
    return torch._C._get_sdp_priority_order()


def _number(name: str) -> int:
    """torch's number of a kernel."""
    from torch.nn.attention import SDPBackend

    return int(SDPBackend.__members__[_BACKENDS[name]].value)


def _switch(kernel: str, on: bool) -> None:
    getattr(torch.backends.cuda, f"enable_{_SWITCHES[kernel]}")(on)
