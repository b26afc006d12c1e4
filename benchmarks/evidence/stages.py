"""The stages, in the order in which they run: what is asked, by which programs, in what time.

``{model}`` is the shipped model, ``{work}`` a folder that all steps share and nobody keeps. Every
program gets ``--json FILE`` and ``--seconds N`` besides, and ``--tiny`` in a rehearsal. The limits
add up to 30 minutes at most.
"""

from __future__ import annotations

from evidence.stage import Stage, Step

__all__ = ["STAGES"]

_LARGE = ("--work", "{work}", "--shapes", "llama-3-8b", "--batches", "1,8,64,256")
_SMALL = ("--work", "{work}", "--shapes", "qwen3-0.6b", "--batches", "1,8,64,256")
_PLATFORMS = ("--under", "platforms")
_TINY = ("--work", "{work}", "--shapes", "tiny", "--batches", "2", "--precisions", "bf16,fp8")

STAGES = (
    Stage(
        "a",
        "install",
        "the installed packages, and the report of interposer doctor",
        (Step("doctor", "gpu_doctor.py", limit_s=60),),
    ),
    Stage(
        "b",
        "choices",
        "kernels and graphs selected for the shipped model and a model of 8 billion weights",
        (Step("choices", "gpu_choices.py", ("{model}", "llama-3-8b"), ("tiny",), 45),),
    ),
    Stage(
        "c",
        "conformance",
        "interposer verify --quick on the device",
        (
            Step("verify_ops", "gpu_conformance.py", ("interposer-ops",), ("interposer-ops",), 240),
            Step("verify_cuda", "gpu_conformance.py", ("interposer-cuda",), limit_s=60),
        ),
    ),
    Stage(
        "d",
        "tests",
        "the tests that need a GPU",
        (
            Step("tests_platforms", "gpu_tests.py", _PLATFORMS, _PLATFORMS, 60),
            Step("tests_ops", "gpu_tests.py", ("--under", "ops"), limit_s=90),
        ),
    ),
    Stage(
        "e",
        "tokens",
        "logits and tokens of the shipped model against transformers, with and without graphs",
        (Step("tokens", "gpu_tokens.py", ("{model}",), ("tiny",), 60),),
    ),
    Stage(
        "j",
        "beyond",
        "a model with weights in host memory, and two ranks on the device",
        (
            Step("offload", "gpu_offload.py", ("--work", "{work}"), ("--work", "{work}"), 80),
            Step("ranks", "gpu_ranks.py", ("{model}",), ("{model}",), 80),
        ),
    ),
    Stage(
        "g",
        "decode",
        "decode and prefill of whole models against transformers with a compiled static cache",
        (
            Step("decode_8b", "gpu_decode.py", (*_LARGE, "--precisions", "bf16"), _TINY, 200),
            Step(
                "decode_8b_narrow", "gpu_decode.py", (*_LARGE, "--precisions", "fp8,int4"), (), 150
            ),
            Step("decode_small", "gpu_decode.py", _SMALL, (), 130),
        ),
    ),
    Stage(
        "i",
        "profile",
        "the kernels of a decode step",
        (
            Step(
                "profile",
                "gpu_profile.py",
                ("--work", "{work}", "--shapes", "qwen3-0.6b,llama-3-8b"),
                ("--work", "{work}"),
                50,
            ),
        ),
    ),
    Stage(
        "f",
        "ops",
        "every op against its roofline, torch and torch.compile",
        (Step("ops", "gpu_ops.py", limit_s=115),),
    ),
    Stage(
        "h",
        "tune",
        "the fastest candidates, as a table that a plugin ships",
        (
            Step(
                "tune",
                "gpu_tune.py",
                ("llama-3-8b", "qwen3-0.6b"),
                ("tiny", "--precisions", "bf16"),
                80,
            ),
        ),
    ),
    Stage(
        "k",
        "judge",
        "the corpus of cheats and honest kernels, judged on the device",
        (Step("judge", "gpu_judge.py", limit_s=300),),
    ),
)
