"""What the backend can serve, without importing it."""

from __future__ import annotations

from interposer import AttentionSpec, Capability, Verdict


def judge(spec: AttentionSpec, capability: Capability) -> Verdict:
    """Accept decoders with a plain cache that see everything, on any device."""
    if spec.window_tokens is not None or spec.softcap is not None:
        return Verdict.refuse("knows neither windows nor caps")
    return spec.judge_plain_decoder()
