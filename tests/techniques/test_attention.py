import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.devices.targets import AbsentGpu
from autotune.records.device import DeviceInfo
from autotune.space import build_space
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.techniques.attention import Attention
from tests.closed_form import inspection

from .kinds import KINDS

techniques = find_techniques()
keep_settings = find_techniques().keep_settings


def gpu(capability: tuple[int, int]) -> AbsentGpu:
    return AbsentGpu(
        DeviceInfo(name="cuda", model="a GPU", total_bytes=2**34, free_bytes=2**34, driver="", capability=capability)
    )


def hugging_face(implementation: str) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = implementation

    def make_batch(n: int) -> Any:
        ids = torch.randint(0, 20, (n, 8))
        return {"input_ids": ids, "labels": ids}

    return Task(build_model=lambda: GPT2LMHeadModel(config), make_batch=make_batch)


def masked() -> Task:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            x = x[:, None, None]
            return self.mix(nn.functional.scaled_dot_product_attention(x, x, x, torch.zeros(1, 1)))[:, 0, 0]

    return Task(build_model=Masked, make_batch=lambda n: (torch.randn(n, 8), torch.randint(0, 4, (n,))))


def torchs_own(call: Callable[[Any, Any], Any] = nn.Module.__call__) -> Task:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return self.head(call(self.encoder, x))

    return Task(build_model=Encoder, make_batch=lambda n: (torch.randn(n, 3, 8), torch.randint(0, 4, (n, 3))))


def test_an_eager_hugging_face_model_has_the_fused_implementation(make_setting: Any) -> None:
    setting = make_setting(hugging_face("eager"))
    assert Attention().support(setting).choices == ("default", "sdpa")
    assert setting.model.config._attn_implementation == "eager"
    session = prepare(setting.task, {"attention": "sdpa"}, device="cpu")
    assert session.model.config._attn_implementation == "sdpa"


def test_a_model_inside_that_is_not_eager_keeps_its_implementation(make_setting: Any) -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1, **sizes}
    images = {"image_size": 8, "patch_size": 4, **sizes}
    own = {"": "eager", "text_config": "eager", "vision_config": "flex_attention"}

    def build_model() -> Any:
        return CLIPModel._from_config(CLIPConfig(text_config=text, vision_config=images), attn_implementation=own)

    def implementations(model: Any) -> list[str]:
        return [each.config._attn_implementation for each in (model, model.text_model, model.vision_model)]

    setting = make_setting(Task(build_model=build_model, make_batch=torch.rand))
    assert Attention().support(setting).choices == ("default", "sdpa")
    assert implementations(setting.model) == ["eager", "eager", "flex_attention"]
    session = prepare(setting.task, {"attention": "sdpa"}, device="cpu")
    assert implementations(session.model) == ["sdpa", "sdpa", "flex_attention"]


def test_a_part_that_is_no_hugging_face_model_follows_the_model_around_it(make_setting: Any) -> None:
    from transformers import SamConfig, SamModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = {"image_size": 16, "patch_size": 8, "output_channels": 8, "mlp_dim": 8, "global_attn_indexes": [0], **sizes}
    config = {
        "vision_config": seen,
        "prompt_encoder_config": {"hidden_size": 8, "image_size": 16, "patch_size": 8},
        "mask_decoder_config": {"mlp_dim": 8, "iou_head_hidden_dim": 8, **sizes},
    }

    def build_model() -> Any:
        return SamModel._from_config(SamConfig(**config), attn_implementation="eager")

    def of_decoder(model: Any) -> str:
        return str(model.config.mask_decoder_config._attn_implementation)

    setting = make_setting(Task(build_model=build_model, make_batch=torch.rand))
    assert Attention().support(setting).choices == ("default", "sdpa")
    assert of_decoder(setting.model) == "eager"
    session = prepare(setting.task, {"attention": "sdpa"}, device="cpu")
    assert of_decoder(session.model) == "sdpa"


def test_the_fused_implementation_computes_the_same() -> None:
    task, gradients = hugging_face("eager"), []
    batch = task.batch(4)
    for choice in ("default", "sdpa"):
        torch.manual_seed(0)
        session = prepare(task, {"batch_size": 4, "attention": choice}, device="cpu")
        torch.manual_seed(0)
        session.model.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else None)
        session.accumulate(batch)
        gradients.append(torch.cat([p.grad.flatten() for p in session.model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_a_fused_hugging_face_model_stays_as_it_is_on_a_cpu(make_setting: Any) -> None:
    support = Attention().support(make_setting(hugging_face("sdpa")))
    assert support.choices == ("default",) and support.optional == ("math",)
    assert "fused kernel wherever it can" in support.reason


def test_a_model_without_fused_attention_has_no_choice(make_setting: Any) -> None:
    support = Attention().support(make_setting(KINDS["unet"]()))
    assert support.choices == ("default",) and not support.optional
    assert "scaled_dot_product_attention" in support.reason


@pytest.mark.parametrize(
    ("task", "capability", "choices"),
    [
        (KINDS["transformer"], (9, 0), {"efficient", "cudnn"}),
        (KINDS["transformer"], (7, 5), {"efficient"}),
        (masked, (8, 0), {"efficient", "cudnn"}),
        (torchs_own, (9, 0), {"efficient", "cudnn"}),
    ],
)
def test_a_gpu_has_the_kernels_that_its_calls_can_use(
    make_setting: Any, task: Any, capability: tuple[int, int], choices: set[str]
) -> None:
    with keep_settings():
        torch._C._set_sdp_priority_order([1, 2, 0, 3])  # flash first
        support = Attention().support(make_setting(task(), device=gpu(capability)))
    assert set(support.choices) == {"default", *choices}
    assert support.optional == ("math",)
    assert "flash: " in support.reason and "math: " in support.reason


def test_a_causal_mask_of_torchs_own_layers_is_none_for_the_kernels(make_setting: Any) -> None:
    """`multi_head_attention_forward` calls attention with `is_causal` in its place."""
    task = torchs_own(lambda encoder, x: encoder(x, nn.Transformer.generate_square_subsequent_mask(3), is_causal=True))
    with keep_settings():
        torch._C._set_sdp_priority_order([3, 1, 2, 0])  # cuDNN first
        support = Attention().support(make_setting(task, device=gpu((9, 0))))
    assert set(support.choices) == {"default", "flash", "efficient"}


def test_in_fp32_no_kernel_but_the_usual_one_is_searched() -> None:
    redundant = Attention().is_redundant
    assert redundant(techniques.complete({"attention": "cudnn"}))
    assert not redundant(techniques.complete({"attention": "cudnn", "amp": "bf16"}))
    assert not redundant(techniques.complete({"attention": "cudnn", "param_dtype": "bf16"}))
    assert not redundant(techniques.complete({"attention": "cudnn", "parallel": "fsdp", "shard_dtype": "bf16"}))
    assert not redundant(techniques.complete({"attention": "sdpa"}))


def loss_of(output: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(output.float().transpose(1, 2), batch[1])


def in_fp32() -> Task:
    return dataclasses.replace(torchs_own(), training_step=lambda model, batch: loss_of(model(batch[0]), batch))


def in_bf16() -> Task:
    return dataclasses.replace(
        torchs_own(),
        build_model=lambda: torchs_own().build_model().bfloat16(),
        training_step=lambda model, batch: loss_of(model(batch[0].bfloat16()), batch),
    )


def under_autocast() -> Task:
    def training_step(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model(batch[0]), batch)

    return dataclasses.replace(torchs_own(), training_step=training_step)


@pytest.mark.parametrize(("task", "searched"), [(in_bf16, True), (under_autocast, True), (in_fp32, False)])
def test_a_model_in_a_short_type_of_its_own_has_the_kernels_without_amp(
    make_setting: Any, task: Any, searched: bool
) -> None:
    with keep_settings():
        torch._C._set_sdp_priority_order([1, 2, 0, 3])  # flash first
        support = Attention().support(make_setting(task(), device=gpu((9, 0))))
    found = inspection(support={**inspection().support, "attention": support})
    space, _ = build_space(found, find_techniques())
    plain = techniques.complete({"batch_size": 4, "attention": "cudnn"}, global_batch=96)
    assert space.contains(plain) is searched
    assert space.contains(plain.replace(amp="bf16"))


def test_a_preferred_kernel_comes_first_and_is_put_back() -> None:
    before = torch._C._get_sdp_priority_order()
    with keep_settings():
        prepare(KINDS["transformer"](), {"attention": "cudnn"}, device="cpu")
        assert torch._C._get_sdp_priority_order()[0] == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
        assert sorted(torch._C._get_sdp_priority_order()) == sorted(before)
    assert torch._C._get_sdp_priority_order() == before


def test_a_preferred_kernel_stays_first_where_torch_settles_its_order_at_its_first_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper and Blackwell GPUs torch puts cuDNN first then, over whatever was set before (sdp_utils.cpp)."""
    made = []

    def choose(*tensors: Any) -> int:
        if not made:
            torch._C._set_sdp_priority_order([3, 1, 2, 0])  # cuDNN, flash, efficient, math
        made.append(tensors)
        return 3

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    with keep_settings():
        prepare(KINDS["transformer"](), {"attention": "flash"}, device="cpu")
        choose()  # by the first call of attention
        assert torch._C._get_sdp_priority_order()[:3] == [1, 3, 2]


@pytest.mark.parametrize("config", [{}, {"checkpoint_segments": 3}])
def test_plain_attention_holds_in_the_recomputation_too(config: dict[str, Any]) -> None:
    task = KINDS["transformer"]()
    with keep_settings():
        session = prepare(task, {"batch_size": 2, "attention": "math", **config}, device="cpu")
        with torch.profiler.profile() as profile:
            session.step(task.batch(2))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in {event.key for event in profile.key_averages()}
    assert torch.backends.cuda.flash_sdp_enabled()


def test_kernels_are_traced_as_the_usual_one() -> None:
    attention = Attention()
    assert {attention.traced_as(choice) for choice in ("flash", "efficient", "cudnn")} == {"default"}
    assert attention.traced_as("sdpa") == "sdpa"
    assert attention.untraceable("math", "cuda") and not attention.untraceable("math", "cpu")
