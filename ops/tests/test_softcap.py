"""Capped logits against another way to write them."""

from __future__ import annotations

import math

import pytest
import torch

from interposer_ops.sampling import logits_softcap


def test_capped_logits_keep_their_order_and_their_limit() -> None:
    logits = torch.tensor([[-1e9, -50.0, -0.01, 0.0, 0.01, 50.0, 1e9]], dtype=torch.float64)
    actual = logits_softcap(logits, 30.0)[0].tolist()
    assert actual == sorted(actual)
    assert actual[0] == -30.0
    assert actual[-1] == 30.0
    assert actual[5] == pytest.approx(30 * math.tanh(50 / 30))
    assert actual[4] == pytest.approx(0.01)
