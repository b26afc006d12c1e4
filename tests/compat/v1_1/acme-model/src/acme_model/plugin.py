"""Two model families."""

from __future__ import annotations

from interposer import ModelEntry, hookimpl

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[ModelEntry]:
    """Return the families."""
    return [
        ModelEntry(
            ("AcmeForCausalLM",),
            "acme_frame",
            "acme_model.frame:Acme",
            score=20.0,
            examples="acme_model.plugin:examples",
            reads=("hidden_size", "rms_norm_eps"),
        ),
        ModelEntry(
            architectures=("AcmeDerivedForCausalLM",),
            name="acme_derived",
            target="acme_model.derived:Derived",
        ),
    ]


def examples() -> dict[str, dict[str, object]]:
    """Return the content of config.json by label."""
    return {"empty": {"architectures": ["AcmeForCausalLM"]}}
