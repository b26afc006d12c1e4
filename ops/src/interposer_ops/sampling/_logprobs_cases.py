"""Test cases of ``token_logprobs``.

Ids are compared exactly: logits are equal or differ by at least 1/64.

B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.sampling._logits_cases import LOGIT_SHAPES, LOGITS, num_rows, random_logits
from interposer_testing.cases import Axis, CaseSpace, Point, peak

_STEP = 1 / 64


def _logprobs(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = _stepped(random_logits(point["logits"], point["shape"], dtype, generator))
    rows, vocab_size = logits.shape
    tokens = torch.randint(vocab_size, (rows,), generator=generator)
    match point["token"]:
        case "likeliest":
            tokens = logits.argmax(-1)
        case "last":
            tokens = torch.full((rows,), vocab_size - 1)
    return _case(logits, tokens, min(point["top"], vocab_size))


token_logprobs_cases = CaseSpace(
    _logprobs,
    Axis("shape", LOGIT_SHAPES),
    Axis("top", {"": 5, "no others": 0, "one other": 1, "twenty others": 20}),
    Axis("logits", LOGITS),
    Axis("token", {"": "any", "likeliest token": "likeliest", "last token": "last"}),
    strided={"logits": "rows", "tokens": "offset"},
    crossed={"shape": ("many rows", "odd vocabulary"), "token": ("",), "top": ("",)},
    alone={"shape": ("no rows", "one token")},
    valid=lambda point, _: (
        (point["shape"] != (2, 32000) or not (point.labels["logits"] or point.labels["token"]))
        and not (point.labels["token"] and point.labels["top"])
    ),
)
"""Chosen tokens of any rank; ties and masked tokens among the likeliest tokens."""


def token_logprobs_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make one row of logits for every sequence of a typical step."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    logits = _stepped(random_logits("random", shape, dtype, generator))
    tokens = torch.randint(shape[1], shape[:1], generator=generator)
    return _case(logits, tokens, int(dims["num_top"]), f"{num_tokens} tokens")


def _stepped(logits: Tensor) -> Tensor:
    """Round logits to multiples of ``_STEP``, so that different logits differ clearly."""
    return ((logits.float() / _STEP).round() * _STEP).to(logits.dtype)


def _case(logits: Tensor, tokens: Tensor, num_top: int, label: str = "") -> Case:
    """Build the case of ``token_logprobs``; the largest exponential of each row's sum is 1.

    The logarithm turns the relative error of the sum, V roundings, into an absolute error.
    """
    vocab_size = logits.shape[1]
    arguments = {"logits": logits, "tokens": tokens, "num_top": num_top}
    dims = {"vocab_size": vocab_size, "num_top": num_top}
    # An exponent, a difference of logits, may be rounded in proportion to its magnitude.
    magnitude = 1 + 2 * peak(logits) / vocab_size
    return Case(label, arguments, dims, reduction=vocab_size + 4, magnitude=magnitude)
