"""AITER is found, examined in a child process and called, with stand-in packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from platforms.rocm.tests.fake_aiter import WORKING, install
from tests.landing import landing_sample
from tests.tape import TapePlatform

from interposer import (
    AttentionBatch,
    AttentionSpec,
    Capability,
    Case,
    Config,
    Device,
    Request,
    Resolver,
    Rule,
    Site,
    current_registry,
)
from interposer.errors import NoCandidateError, PluginError
from interposer.records import Kernel, load_target
from interposer_ops.cases import bounded_case, routed, shape_of, spread
from interposer_ops.experts import fused_experts, fused_experts_fp8
from interposer_ops.latent_attention import latent_attention_decode
from interposer_rocm._aiter import library as aiter_library
from interposer_rocm._aiter.experts import fused_experts as fused_experts_aiter
from interposer_rocm._aiter.experts import prepare
from interposer_rocm._aiter.flash import AiterFlashBackend
from interposer_rocm._aiter.fp8_experts import prepare as prepare_fp8
from interposer_rocm._aiter.latent import latent_attention_decode as latent_attention_decode_aiter
from interposer_rocm._aiter.latent_backend import AiterLatentBackend
from interposer_rocm._aiter.library import AiterError, inquire, refresh, require
from interposer_rocm._aiter.package import aiter_version, judge_device, judge_flash
from interposer_rocm.plugin import interposer_records
from interposer_testing import attention_specs, check_attention, check_kernel
from interposer_testing.cases import normal
from interposer_testing.workload import paged_batch, random_projections

# One worker asks about the package.
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("aiter")]

PARTS = {"interposer-ops", "interposer-rocm"}
# The folder that was asked about last.
USED: list[Path] = []
MI300X = Device("rocm", "cpu", "the CPU as a stand-in", Capability("gfx942"))


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("aiter"), WORKING)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that puts a folder on the path for this test."""

    def put(folder: Path) -> None:
        monkeypatch.syspath_prepend(str(folder))
        if [folder] != USED:  # an inquiry takes seconds
            refresh()
        USED[:] = [folder]

    unload()
    yield put
    unload()


def unload() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def broken(tmp_path: Path, text: str, **others: str) -> Path:
    return install(tmp_path, {**WORKING, "aiter/__init__.py": text, **others})


def resolver(**settings: Any) -> Resolver:
    config = Config(plugins=PARTS, isolation="off", **settings)
    return Resolver(current_registry(config), MI300X, config, trusted=frozenset(PARTS))


def test_aiter_is_found_by_its_files_alone(working: Path, use: Any) -> None:
    assert judge_device("gfx942").reason == (
        "needs AITER, which is not installed. Try: pip install amd-aiter"
    )
    use(working)
    assert aiter_version() == "0.1.9"
    assert judge_device("gfx942")
    assert judge_device("gfx1100").reason == (
        "AITER has kernels for gfx942 and gfx950, the device is gfx1100"
    )
    assert "aiter" not in sys.modules


def test_another_package_of_that_name_is_not_used(tmp_path: Path, use: Any) -> None:
    use(install(tmp_path, {"aiter.py": "raise SystemExit('imported')"}, "aiter", "0.13.20191203"))
    assert judge_device("gfx942").reason.startswith("the installed package aiter is another one")


def test_functions_are_reported_with_their_parameters(working: Path, use: Any) -> None:
    use(working)
    found = inquire()
    assert found.verdict
    assert "kv_page_indices" in found.parameters[aiter_library.FLASH]
    assert "aiter" not in sys.modules
    require(*found.parameters)


@pytest.mark.parametrize(
    ("text", "expected", "is_known"),
    landing_sample(
        [
            (
                "import flydsl_of_nowhere",
                "needs the package flydsl_of_nowhere. Try: pip install",
                True,
            ),
            (
                "raise ImportError('x.so: undefined symbol: _ZN3c10')",
                "ImportError: x.so: undef",
                True,
            ),
            (
                "raise RuntimeError('Get GPU arch from rocminfo failed')",
                "RuntimeError: Get GPU",
                True,
            ),
            ("raise FileNotFoundError('hipcc')", "FileNotFoundError: hipcc", True),
            ("raise AssertionError('who knows')", "AssertionError: who knows", False),
            ("raise SystemExit(3)", "SystemExit: 3", False),
            ("import os; os.kill(os.getpid(), 11)", "ended with SIGSEGV: it printed nothing", True),
            (
                "import os, sys; os.write(2, b'no HIP'); os._exit(9)",
                "ended with code 9: no HIP",
                True,
            ),
        ],
        every=3,
    ),
)
def test_failures_are_refusals(
    text: str, expected: str, is_known: bool, tmp_path: Path, use: Any
) -> None:
    use(broken(tmp_path, text))
    verdict = inquire().verdict
    assert not verdict
    assert expected in verdict.reason
    assert ("Traceback" in verdict.traceback) == (not is_known)
    with pytest.raises(AiterError if is_known else PluginError):
        require(aiter_library.FLASH)


@pytest.mark.slow
def test_an_import_that_hangs_is_stopped(tmp_path: Path, use: Any) -> None:
    use(broken(tmp_path, "import time; time.sleep(600)"))
    verdict = inquire(limit_seconds=3.0).verdict
    assert verdict.reason == (
        "AITER 0.1.9 was not imported within 3 s, in which it may compile. What it has compiled is "
        "kept: try again"
    )


@pytest.mark.slow
def test_output_of_the_import_is_not_the_answer(tmp_path: Path, use: Any) -> None:
    noise = "print('[aiter] start build'); import os; os.system('echo compiling'); "
    use(broken(tmp_path, noise + WORKING["aiter/__init__.py"]))
    assert inquire().verdict


@pytest.mark.slow
def test_missing_parameters_are_named(tmp_path: Path, use: Any) -> None:
    old = "def mla_decode_fwd(q, kv_buffer, o, kv_indptr, kv_indices, kv_last_page_lens): ..."
    shuffle = {"aiter/ops/shuffle.py": "", "aiter/mla.py": old}
    use(install(tmp_path, {**WORKING, **shuffle, "aiter/fused_moe.py": "fused_moe = 1"}))
    found = inquire()
    assert found.judge(aiter_library.FLASH)
    assert found.judge(aiter_library.MLA_DECODE).reason == (
        "aiter.mla.mla_decode_fwd of AITER 0.1.9 takes no max_seqlen_q, qo_indptr, sm_scale. "
        "Try another version"
    )
    assert found.judge(aiter_library.FUSED_MOE).reason == (
        "AITER 0.1.9 has no aiter.fused_moe.fused_moe. Try a newer one"
    )


@pytest.mark.slow
def test_a_changed_setting_starts_a_new_inquiry(
    tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = "import os\nif not os.environ.get('AITER_SWITCH'): raise ImportError('switched off')\n"
    use(broken(tmp_path, switch + WORKING["aiter/__init__.py"]))
    assert "switched off" in inquire().verdict.reason
    monkeypatch.setenv("AITER_SWITCH", "1")
    assert inquire().verdict
    monkeypatch.delenv("AITER_SWITCH")
    assert not inquire().verdict  # remembered, for the setting of before


@pytest.mark.slow
def test_a_repaired_package_is_used_after_a_refresh(tmp_path: Path, use: Any) -> None:
    folder = broken(tmp_path, "raise ImportError('broken')")
    use(folder)
    assert not inquire().verdict
    (folder / "aiter/__init__.py").write_text(WORKING["aiter/__init__.py"])
    assert not inquire().verdict
    refresh()
    assert inquire().verdict


SPECS = [
    (label, spec)
    for label, spec in attention_specs(quick=True)
    if judge_flash(spec, Capability("sm_90")).reason.startswith("AITER has kernels for")
]


@pytest.mark.landing(2)
@pytest.mark.parametrize("spec", [spec for _, spec in SPECS], ids=[label for label, _ in SPECS])
def test_flash_attends_as_the_ops_define(spec: AttentionSpec, working: Path, use: Any) -> None:
    use(working)
    assert judge_flash(spec, MI300X.capability)
    site = Site(resolver(), "attention", spec.dtype)
    assert check_attention(AiterFlashBackend, spec, site) == []


def decoding(lengths: Sequence[int], page_size: int, most_pages: int) -> AttentionBatch:
    """Return a step of one token per sequence, as a graph has room for it."""
    tables = torch.randperm(len(lengths) * most_pages).view(len(lengths), most_pages)
    batch = paged_batch(list(tables), [n - 1 for n in lengths], [1] * len(lengths), page_size)
    return replace(batch, max_seq_tokens=most_pages * page_size)


def test_flash_is_captured_and_replayed_with_other_lengths(working: Path, use: Any) -> None:
    use(working)
    spec = replace(SPECS[0][1], page_size=4, window_tokens=None, softcap=None)
    backend = AiterFlashBackend(spec, Site(resolver(), "attention", spec.dtype))
    torch.manual_seed(0)
    held = decoding([1, 1, 1], 4, 6)
    (cache,) = backend.kv_layout().allocate(1, 18, "cpu")
    cache.normal_()
    query, key, value = random_projections(spec, 3, torch.Generator().manual_seed(1), fused=False)
    addresses = (cache.data_ptr(), held.slots.data_ptr())
    replay = TapePlatform().capture_graph(
        lambda: backend.forward(query, key, value, cache, backend.plan(held))
    )
    for lengths in ([5, 24, 1], [4, 8, 17], [1, 1, 2]):
        now = decoding(lengths, 4, 6)
        for name in ("query_starts", "seq_lens", "page_table", "slots"):
            getattr(held, name).copy_(getattr(now, name))
        for tensor in (query, key, value):
            tensor.normal_()
        own = cache.clone()
        expected = backend.forward(query, key, value, own, backend.plan(now))
        torch.testing.assert_close(replay(), expected, rtol=0, atol=0)
        assert torch.equal(cache, own)
    assert addresses == (cache.data_ptr(), held.slots.data_ptr())


@pytest.mark.parametrize(
    ("hip", "architecture", "softcap", "refused"),
    [
        ("7.2.26015", "gfx950", None, True),
        ("7.2.26015", "gfx950", 30.0, False),
        ("7.2.26015", "gfx942", None, False),
        ("7.0.51831", "gfx950", None, False),
    ],
)
def test_a_rocm_that_miscompiles_is_refused(
    hip: str,
    architecture: str,
    softcap: float | None,
    refused: bool,
    working: Path,
    use: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(working)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "", raising=False)
    made = resolver()
    made.device = replace(MI300X, capability=Capability(architecture))
    spec = replace(SPECS[0][1], softcap=softcap)
    site = Site(made, "attention", spec.dtype)
    if refused:
        with pytest.raises(AiterError, match=r"ROCm 7\.2\.26015 compiles AITER's causal attention"):
            AiterFlashBackend(spec, site)
    else:
        assert AiterFlashBackend(spec, site).kv_layout()


def test_many_specs_are_checked() -> None:
    assert len(SPECS) >= 6
    assert any(spec.window_tokens for _, spec in SPECS)
    assert any(spec.softcap for _, spec in SPECS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sinks": True}, "does not do sinks"),
        ({"type": "encoder"}, "serves decoder attention only, got encoder"),
        ({"head_size": 264}, "head_size is 264, must be a multiple of 8 up to 256"),
        ({"num_heads": 3, "num_kv_heads": 2}, "needs heads in groups of one size"),
        ({"cache_dtype": torch.float8_e4m3fnuz}, "stores the cache as torch.bfloat16"),
        ({"dtype": torch.float32}, "computes in floats of 16 bits, got torch.float32"),
    ],
)
def test_unsupported_flash_attention_is_refused(change: dict[str, Any], expected: str) -> None:
    spec = replace(SPECS[0][1], **change)
    assert AiterFlashBackend.accepts(spec, MI300X.capability).reason.startswith(expected)


def test_latent_attention_matches_the_op(working: Path, use: Any) -> None:
    use(working)
    checked = 0
    for case in latent_attention_decode.cases(torch.bfloat16, 0):
        checked += 1
        faults = check_kernel(latent_attention_decode, latent_attention_decode_aiter, case)
        assert faults == [], case.label
    assert checked >= 10


LATENT = next(
    replace(spec, num_heads=16)
    for label, spec in attention_specs()
    if label.startswith("latent 512+64 page 4") and spec.dtype == torch.bfloat16
)


def test_latent_decodes_are_planned_once_per_step(working: Path, use: Any) -> None:
    use(working)
    calls = aiter_library.function(aiter_library.MLA_DECODE).__globals__["CALLS"]
    calls.clear()
    assert AiterLatentBackend.accepts(LATENT, MI300X.capability)
    assert check_attention(AiterLatentBackend, LATENT, Site(resolver(), "a", LATENT.dtype)) == []
    # Of the kit's steps of two layers, one is a decode alone and one has decodes of all.
    assert calls == [1, 1, 6, 6]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"latent": False}, "serves latent attention only"),
        ({"dtype": torch.float16, "cache_dtype": torch.float16}, "computes in torch.bfloat16, got"),
        ({"cache_dtype": torch.float8_e4m3fnuz}, "stores the cache as torch.bfloat16"),
        ({"latent_size": 448}, "needs latents of 512 + 64, got 448 + 128"),
        ({"num_heads": 24}, "num_heads is 24, must be one of (16, 128)"),
        ({}, "needs AITER, which is not installed"),
    ],
)
def test_unsupported_latent_attention_is_refused(changes: dict[str, Any], expected: str) -> None:
    spec = replace(LATENT, **changes)
    assert AiterLatentBackend.accepts(spec, MI300X.capability).reason.startswith(expected)


@pytest.mark.parametrize("ranks", ["none", "some", "all"])
@pytest.mark.parametrize("shape", [(9, 128, 128, 5, 2), (1, 256, 128, 4, 4), (0, 128, 128, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_match_the_op(
    dtype: torch.dtype, shape: tuple[int, ...], ranks: str, working: Path, use: Any
) -> None:
    """Experts that no token chose are NaN, so that reading one is seen."""
    use(working)
    tokens, hidden, inner, num_experts, _ = shape
    point: Any = {"shape": shape, "ranks": ranks}
    generator = torch.Generator().manual_seed(0)
    gate_up = normal((num_experts, 2 * inner, hidden), dtype, generator, hidden**-0.5)
    down = normal((num_experts, hidden, inner), dtype, generator, inner**-0.5)
    arguments = {
        "x": normal((tokens, hidden), dtype, generator),
        "gate_up": gate_up,
        "gate_up_bias": None,
        "down": down,
        "down_bias": None,
        **routed(point, generator),
        "activation": "silu",
    }
    case = bounded_case(arguments, gate_up.clone(), down.clone(), {"biased": False})
    assert check_kernel(fused_experts, fused_experts_aiter, case, prepare=prepare) == []


GRANULARITIES = {"tensor": (1, 1), "channel": (256, 1), "block": (2, 2)}


def scaled_experts(granularity: str, tokens: int = 9) -> Case:
    """Return a case of experts of 8 bits, of 256 inputs and 128 inside."""
    generator = torch.Generator().manual_seed(0)
    dims = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2}
    arguments: dict[str, Any] = {"x": normal((tokens, 256), torch.bfloat16, generator)}
    wide = {}
    for name, columns in (("gate_up", 256), ("down", 128)):
        weight = normal((4, 256, columns), torch.float32, generator).to(torch.float8_e4m3fn)
        rows, across = GRANULARITIES[granularity]
        scale = torch.rand((4, rows, max(across * columns // 256, 1)), generator=generator) + 0.5
        arguments |= {name: weight, f"{name}_scale": scale * columns**-0.5}
        wide[name] = spread(weight.float(), arguments[f"{name}_scale"])
    point: Any = {"shape": shape_of(dims, tokens), "ranks": "some"}
    arguments |= {**routed(point, generator), "activation": "silu"}
    return bounded_case(arguments, wide["gate_up"], wide["down"], {"granularity": granularity})


RECORDS = {r.name: r for r in interposer_records() if isinstance(r, Kernel)}
SCALED = ("fused_experts_fp8_aiter", "fused_experts_fp8_aiter_fnuz")


def test_fp8_experts_match_the_op(working: Path, use: Any) -> None:
    """Results stay within the error that the record states of rounded activations."""
    use(working)
    for name, granularity in product(SCALED, GRANULARITIES):
        record = RECORDS[name]
        kernel, prepare = load_target(record.target), load_target(record.prepare)
        case = scaled_experts(granularity)
        allowing = fused_experts_fp8.allowing(record.extra_roundings)
        assert check_kernel(allowing, kernel, case, prepare=prepare) == [], (name, granularity)
        assert check_kernel(fused_experts_fp8, kernel, case, prepare=prepare), (name, granularity)


SCALED_DIMS: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2},
    **{"activation": "silu", "granularity": "block", "weight_dtype": "float8_e4m3fn"},
    **{"block_rows": 128, "block_columns": 128},
}


def bound_of_8_bits(**dims: Any) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Return the experts chosen under a wish for AITER's, the refusals, and the notes."""
    capability = Capability("gfx942", frozenset({"fp8_fnuz"}))
    device = replace(MI300X, capability=capability)
    wanted = Rule(prefer=["*_aiter*"])
    # The stand-in computes no experts, which the canary would notice.
    config = Config(
        plugins=PARTS, isolation="off", canary="off", kernels={"fused_experts_fp8": wanted}
    )
    found = Resolver(current_registry(config), device, config, trusted=frozenset(PARTS))
    choice = found.kernel(fused_experts_fp8, torch.bfloat16, {**SCALED_DIMS, **dims}, "m").choice
    refusals = {refusal.candidate: refusal.reason for refusal in choice.refusals}
    return choice.chosen.name, refusals, choice.notes


def test_fp8_experts_report_their_roundings(working: Path, use: Any) -> None:
    use(working)
    chosen, refusals, notes = bound_of_8_bits()
    assert chosen == "fused_experts_fp8_aiter_fnuz"
    assert refusals["fused_experts_fp8_aiter"] == "needs fp8_ocp, which the device lacks"
    assert "rounds activations to 8-bit floats" in notes
    assert "may be off by 78 roundings more than the op allows" in notes


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"block_rows": 64}, "takes scales of blocks of 128 by 128, got 64 by 128"),
        ({"weight_dtype": "float8_e5m2"}, "weight_dtype is 'float8_e5m2', must be one of"),
        ({"activation": "gelu"}, "activation is 'gelu', must be one of ['silu']"),
    ],
)
def test_unsupported_fp8_experts_are_refused(
    dims: dict[str, Any], expected: str, working: Path, use: Any
) -> None:
    use(working)
    chosen, refusals, _ = bound_of_8_bits(**dims)
    assert "aiter" not in chosen
    assert refusals["fused_experts_fp8_aiter_fnuz"].startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("fused_moe.py", "w1_scale=None, w2_scale=None, ", "", "takes no w1_scale, w2_scale. Try"),
        ("ops/shuffle.py", "def shuffle_weight(x, ", "def shuffle_weight(x, y, ", "'y'"),
    ],
)
def test_another_kernel_is_used_if_preparing_an_expert_fails(
    file: str, old: str, new: str, expected: str, tmp_path: Path, use: Any
) -> None:
    changed = WORKING[f"aiter/{file}"].replace(old, new)
    assert changed != WORKING[f"aiter/{file}"]
    use(install(tmp_path, {**WORKING, f"aiter/{file}": changed}))
    chosen, refusals, _ = bound_of_8_bits()
    assert "aiter" not in chosen
    assert expected in refusals["fused_experts_fp8_aiter_fnuz"]


def test_other_block_sizes_are_refused(working: Path, use: Any) -> None:
    use(working)
    weight = torch.zeros((1, 256, 256), dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"has scales of \(4, 4\), must be \(2, 2\): one per bl"):
        prepare_fp8(weight, torch.ones(1, 4, 4), weight, torch.ones(1, 2, 2))


PREFERRED = Rule(prefer=["*_aiter"])
EXPERTS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 4,
    "top_k": 2,
    "activation": "silu",
    "biased": False,
}


def bound(**settings: Any) -> tuple[str, dict[str, str]]:
    """Return the experts that are chosen, and the refusals of others."""
    choice = resolver(**settings).kernel(fused_experts, torch.bfloat16, EXPERTS, "m").choice
    return choice.chosen.name, {refusal.candidate: refusal.reason for refusal in choice.refusals}


def test_aiter_is_used_if_preferred(working: Path, use: Any) -> None:
    use(working)
    assert bound()[0] == "fused_experts_in_turn"
    assert "aiter" not in sys.modules
    assert bound(kernels={"fused_experts": PREFERRED})[0] == "fused_experts_aiter"
    assert bound(kernels={"fused_experts": "fused_experts_aiter"})[0] == "fused_experts_aiter"


def test_another_kernel_is_used_if_aiter_is_unusable(tmp_path: Path, use: Any) -> None:
    use(broken(tmp_path, "raise ImportError('x.so: undefined symbol')"))
    chosen, refusals = bound(kernels={"fused_experts": PREFERRED})
    assert chosen == "fused_experts_in_turn"
    assert refusals["fused_experts_aiter"] == (
        "AITER 0.1.9 cannot be imported: ImportError: x.so: undefined symbol"
    )
    with pytest.raises(NoCandidateError, match="undefined symbol"):
        bound(kernels={"fused_experts": "fused_experts_aiter"})


def test_a_pinned_backend_reports_its_failure(tmp_path: Path, use: Any) -> None:
    use(broken(tmp_path, "raise AssertionError('who knows')"))
    _, spec = SPECS[0]
    pinned = resolver(attention={"decoder": "aiter_flash"})
    with pytest.raises(NoCandidateError) as caught:
        pinned.attention(spec, Site(pinned, "attention", spec.dtype))
    (refusal,) = [r for r in caught.value.refusals if r.candidate == "aiter_flash"]
    assert refusal.reason == "AITER 0.1.9 cannot be imported: AssertionError: who knows"
    assert "Traceback" in refusal.traceback


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("gfx942", {}, ""),
        ("gfx942", {"cache_dtype": "float8_e4m3fnuz"}, ""),
        ("gfx942", {"cache_dtype": "float8_e4m3fn"}, "reads caches of bfloat16 or float8_e4m3fnuz"),
        ("gfx950", {"cache_dtype": "float8_e4m3fn"}, ""),
        ("gfx950", {"latent_size": 256}, "needs latents of 512 + 64, got 256 + 64"),
        ("gfx950", {"num_heads": 24}, "num_heads is 24, must be one of (16, 128)"),
        ("gfx90a", {}, "AITER has kernels for gfx942 and gfx950"),
    ],
)
def test_latent_attention_takes_the_cache_formats_of_the_hardware(
    architecture: str, changes: dict[str, Any], expected: str, working: Path, use: Any
) -> None:
    from interposer_rocm._aiter.package import judge_latent

    use(working)
    dims: dict[str, Any] = {
        "num_heads": 16,
        "latent_size": 512,
        "rotary_size": 64,
        "cache_dtype": "bfloat16",
    }
    request = Request(
        "kernel",
        "latent_attention_decode",
        "rocm",
        Capability(architecture),
        "bfloat16",
        {**dims, **changes},
    )
    verdict = judge_latent(request)
    assert verdict.reason.startswith(expected)
    assert verdict.accepted == (not expected)
    if verdict:
        assert aiter_library.confirm_latent(request)


def test_a_quantized_cache_needs_a_parameter_for_its_scale(tmp_path: Path, use: Any) -> None:
    mla = WORKING["aiter/mla.py"].replace("    kv_scale=None,\n", "")
    use(install(tmp_path, {**WORKING, "aiter/mla.py": mla}))
    dims: dict[str, Any] = {"cache_dtype": "float8_e4m3fnuz"}
    request = Request("kernel", "latent_attention_decode", "rocm", dtype="bfloat16", dims=dims)
    assert aiter_library.confirm_latent(request).reason.startswith(
        "aiter.mla.mla_decode_fwd of AITER 0.1.9 takes no kv_scale, which a cache of float8"
    )
    plain = replace(request, dims={"cache_dtype": "bfloat16"})
    assert aiter_library.confirm_latent(plain)


PROGRAM = """
import json, sys
import interposer
explanation = interposer.explain(sys.argv[1], "mi300x")
rows = explanation.why("decoder").rows
said = [str(refusal) for row in rows for refusal in row.choice.refusals]
print(json.dumps([said, sorted(name for name in sys.modules if name.startswith("aiter"))]))
"""


@pytest.mark.slow
def test_planning_for_a_described_device_imports_nothing(tmp_path: Path) -> None:
    folder = install(tmp_path, {**WORKING, "aiter/__init__.py": "raise SystemExit('imported')"})
    model = Path(__file__).parents[3] / "examples/models/stdlib-lm"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    refusals, modules = json.loads(done.stdout)
    assert modules == []
    (own,) = [text for text in refusals if text.startswith("aiter_flash")]
    assert own.endswith("accepted, but never measured on this device (gfx942)")
