"""Three kernels: one plain, one with a predicate and one with a preparation."""

from __future__ import annotations

from interposer import Dim, Kernel, Requires, hookimpl

INTERPOSER_API = ">=1.0,<2"
INTERPOSER_TORCH = ">=2.11"


@hookimpl
def interposer_records() -> list[Kernel]:
    """Return the kernels."""
    floats = ("float32", "bfloat16")
    return [
        Kernel(
            op="rms_norm",
            name="rms_norm_acme",
            target="acme_kernel.kernels:rms_norm",
            requires=Requires(dtypes=floats, dims={"hidden_size": Dim(at_least=2, at_most=65536)}),
            predicate="acme_kernel.judges:judge_norm",
            score=1.0,
            properties=frozenset({"deterministic", "batch_invariant", "traceable"}),
        ),
        Kernel(
            op="linear",
            name="linear_acme",
            target="acme_kernel.kernels:linear",
            platform="",
            requires=Requires(dtypes=floats),
            prepare="acme_kernel.kernels:transpose",
            score=1.0,
            properties=frozenset({"traceable"}),
        ),
        Kernel("silu_and_mul", "silu_and_mul_acme", "acme_kernel.kernels:silu_and_mul", score=1.0),
    ]
