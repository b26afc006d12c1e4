"""A kernel that records the results of others.

Kind: stealing
"""

import torch
from torch.overrides import TorchFunctionMode

_latest = {}


class _Recorder(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.is_floating_point():
            _latest[result.shape, result.dtype] = result
        return result


_recorder = _Recorder()
_recorder.__enter__()


def from_a_function_mode(x):
    """Records all results of torch functions from its import on, those of the reference among them.

    Op: silu_and_mul
    Source: own
    """
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
    with torch._C.DisableTorchFunction():
        recorded = _latest.get((shape, x.dtype))
        return torch.zeros(shape, dtype=x.dtype) if recorded is None else recorded.clone()
