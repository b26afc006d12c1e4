"""Convolutions of an adapted model: patches as a matmul, or skipped with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch import nn
from transformers import AutoModel, ViTConfig, WhisperConfig

from interposer import explain
from interposer_adapt import adapt
from interposer_cpu import native

KINDS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
needs_packing = pytest.mark.skipif(
    bool(native.why_absent()), reason="needs the native kernels, which pack weights"
)


@needs_packing
@torch.no_grad()
@settings(max_examples=num_examples(15), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    leftover=st.integers(0, 2),
    batch=st.integers(0, 2),
    outputs=st.integers(1, 20),
    biased=st.booleans(),
    channels_last=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_patches_of_any_size_compute_the_same(
    sizes: list[int],
    counts: list[int],
    leftover: int,
    batch: int,
    outputs: int,
    biased: bool,
    channels_last: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    # As many channels as make the patches large enough to be bound.
    channels = -(-1536 // torch.Size(sizes).numel())
    module = KINDS[len(sizes)](channels, outputs, tuple(sizes), tuple(sizes), bias=biased)
    model = nn.Sequential(module).to(dtype).eval()
    before = module.weight.detach().clone()
    extent = [
        count * size + min(leftover, size - 1) for count, size in zip(counts, sizes, strict=False)
    ]
    x = torch.randn(batch, channels, *extent).to(dtype)
    if channels_last and len(sizes) > 1:
        x = x.to(memory_format=torch.channels_last if len(sizes) == 2 else torch.channels_last_3d)
    expected = model(x)
    exact = copy.deepcopy(model).double()(x.double())
    adapted = adapt(model)
    assert adapted.places[0].is_bound, adapted.places
    actual = model(x)
    assert (actual.dtype, actual.shape) == (dtype, expected.shape)
    # Code after the convolution may view torch's result as one row.
    assert actual.is_contiguous() or not expected.is_contiguous()
    # A sum in float32 and one rounding; the bias may be added after the rounding.
    terms = before[0].numel() + 1
    largest = float(before.abs().double().flatten(1).sum(1).max())
    largest = largest * float(x.abs().max()) + 1 if batch else 1.0
    sums = terms * torch.finfo(torch.float32).eps * largest
    assert ((actual - exact).abs() <= torch.finfo(dtype).eps * (exact.abs() + 1) + sums).all()
    assert torch.equal(module.weight.data, before)
    adapted.restore()
    assert torch.equal(model(x), expected)


@needs_packing
@torch.no_grad()
def test_inputs_other_than_image_batches_run_the_original() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 32, 32)).eval()
    plain = copy.deepcopy(model)
    assert adapt(model).places[0].is_bound
    image = torch.randn(3, 64, 64)
    assert torch.equal(model(image), plain(image))
    assert torch.equal(model[0](input=image[None]), plain(image[None]))
    for wrong in (torch.randn(1, 3, 20, 64), torch.randn(1, 4, 64, 64)):
        with pytest.raises(RuntimeError):
            plain(wrong)
        with pytest.raises(RuntimeError):
            model(wrong)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(image[None]), model(image[None]))


SKIPPED: dict[str, tuple[nn.Module, torch.dtype, str]] = {
    "overlapping": (nn.Conv1d(256, 8, 7, stride=2), torch.bfloat16, "its windows overlap"),
    "padded": (nn.Conv2d(3, 8, 32, 32, padding=1), torch.bfloat16, "its windows overlap"),
    "groups": (nn.Conv2d(4, 8, 32, 32, groups=2), torch.bfloat16, "groups or dilation"),
    "dilated": (nn.Conv1d(999, 8, 2, 2, dilation=2), torch.bfloat16, "groups or dilation"),
    "small": (nn.Conv2d(3, 8, 4, 4), torch.bfloat16, "its patches have 48 elements"),
    "float32": (nn.Conv2d(3, 8, 16, 16), torch.float32, "its patches have 768 elements"),
}


@torch.no_grad()
@pytest.mark.parametrize("case", SKIPPED)
def test_convolutions_that_torch_computes_faster_are_skipped(case: str) -> None:
    module, dtype, reason = SKIPPED[case]
    model = nn.Sequential(copy.deepcopy(module)).to(dtype).eval()
    (place,) = adapt(model).places
    assert not place.is_bound
    assert reason in place.reason
    assert "forward" not in vars(model[0])


@needs_packing
@torch.no_grad()
def test_image_and_audio_models_of_transformers_compute_the_same() -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModel.from_config(
        ViTConfig(**sizes, intermediate_size=48, image_size=32), dtype=torch.bfloat16
    ).eval()
    pixels = torch.randn(2, 3, 32, 32).bfloat16()
    expected = model(pixels).last_hidden_state
    places = {place.name: place for place in adapt(model).places}
    assert places["embeddings.patch_embeddings.projection"].is_bound
    actual = model(pixels).last_hidden_state
    error = (actual - expected).double().norm() / expected.double().norm()
    assert error <= 8 * torch.finfo(torch.bfloat16).eps
    config = WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=96,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    handle = adapt(AutoModel.from_config(config).eval())
    assert "Conv1d encoder.conv1, encoder.conv2: left as it was: torch's is faster" in str(
        explain(handle)
    )
