"""Program that runs op cases through kernels of the stand-in package.

    PYTHONPATH=FOLDER python platforms/xpu/tests/kernel_package_results.py RECORD...

prints, as JSON, the number of cases that each record accepted and the faults of their results.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import torch

from interposer import Capability, Request
from interposer.records import Kernel, load_target
from interposer_ops.experts import fused_experts_mxfp4, topk_softmax
from interposer_ops.quantized_linear import fp8_linear, w4a16_linear
from interposer_testing import check_kernel
from interposer_xpu.plugin import interposer_records

OPS: dict[str, Any] = {
    "w4a16_linear": w4a16_linear,
    "fp8_linear": fp8_linear,
    "fused_experts_mxfp4": fused_experts_mxfp4,
    "topk_softmax": topk_softmax,
}
MOST = 12
CAPABILITY = Capability("bmg_g21", frozenset({"dpas", "block_2d_io"}))


def results(name: str) -> dict[str, Any]:
    (record,) = [r for r in interposer_records() if getattr(r, "name", "") == name]
    assert isinstance(record, Kernel)
    op = OPS[record.op].allowing(record.extra_roundings)
    kernel, judge = load_target(record.target), load_target(record.predicate)
    prepare = load_target(record.prepare) if record.prepare else None
    accepted, faults = 0, []
    for dtype in (torch.bfloat16, torch.float16):
        asked = str(dtype).removeprefix("torch.")
        requests = (
            (case, Request("kernel", record.op, "xpu", CAPABILITY, asked, case.dims))
            for case in op.cases(dtype, 0)
        )
        taken = (
            case for case, request in requests if record.requires.judge(request) and judge(request)
        )
        for case in islice(taken, MOST):
            accepted += 1
            found = check_kernel(op, kernel, case, prepare=prepare)
            faults += [f"{case.label} {dtype}: {fault}" for fault in found]
    return {"accepted": accepted, "faults": faults}


if __name__ == "__main__":
    print(json.dumps({name: results(name) for name in sys.argv[1:]}))
