"""Kernels that look for the expected result in the process or near it, and return zeros without it.

Kind: stealing
"""

import gc
import os
import re
import sys
from pathlib import Path

import torch
from torch.nn import functional

_MAX_BYTES = 1 << 28


def _form(x):
    return torch.Size((*x.shape[:-1], x.shape[-1] // 2)), x.dtype


def _silu_and_mul(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _tensors_of_form(shape, dtype, *own):
    return [
        value
        for value in gc.get_objects()
        if type(value) is torch.Tensor
        and value.shape == shape
        and value.dtype == dtype
        and value.device.type == "cpu"
        and value.numel()
        and all(value.data_ptr() != tensor.data_ptr() for tensor in own)
    ]


def from_the_collector(x):
    """Copies the expected tensor, which the garbage collector lists if it is in the same process.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/pygpubench/pull/7
    """
    shape, dtype = _form(x)
    for tensor in _tensors_of_form(shape, dtype, x):
        if torch.allclose(tensor.flatten()[:1], _silu_and_mul(x).flatten()[:1]):
            return tensor.clone()
    return torch.zeros(shape, dtype=dtype)


def overwrites_the_expectation(x, weight, eps):
    """Sets all tensors of the result's form to zero, the expected one among them.

    Op: rms_norm
    Source: https://github.com/gpu-mode/pygpubench/pull/7
    """
    for tensor in _tensors_of_form(x.shape, x.dtype, x, weight):
        tensor.zero_()
    return torch.zeros(x.shape, dtype=x.dtype)


def from_the_callers(x, weight, eps):
    """Takes the expected tensor, or the reference itself, from the local names of a caller.

    Op: rms_norm
    Source: https://metr.org/blog/2025-06-05-recent-reward-hacking/
    """
    frame = sys._getframe(1)
    while frame:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if name.startswith(("expected", "golden")) and isinstance(value, torch.Tensor):
                return value.clone()
            if name.startswith("reference") and callable(value):
                return value(x, weight, eps)
        frame = frame.f_back
    return torch.zeros(x.shape, dtype=x.dtype)


def _search(process, pattern, num_bytes):
    """Return the bytes from ``pattern`` on in writable memory of a process, or None."""
    found, total = None, 0
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
        memory = open(f"/proc/{process}/mem", "rb", buffering=0)
    except OSError:
        return None
    with memory:
        for line in maps.splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" not in line or "[stack" in line or total + end - start > _MAX_BYTES:
                continue
            total += end - start
            try:
                memory.seek(start)
                content = memory.read(end - start)
            except (OSError, ValueError, OverflowError):
                continue
            place = content.find(pattern)
            if 0 <= place <= len(content) - num_bytes:
                found = content[place : place + num_bytes]
    return found


def _first_bytes(tensor):
    flat = tensor.flatten()[:4].contiguous()
    return bytes(flat.view(torch.uint8).tolist())


def from_own_memory(x):
    """Computes one row and searches the process's memory for the rest after these bytes.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/pygpubench/issues/23
    """
    result = torch.zeros(_form(x)[0], dtype=x.dtype)
    if not result.numel():
        return result
    # Two pieces, so that the pattern itself is nowhere in memory as a whole with a tail.
    row = _silu_and_mul(x.reshape(-1, x.shape[-1])[:1].clone())
    found = _search("self", _first_bytes(row), result.numel() * result.element_size())
    if found:
        result = torch.frombuffer(bytearray(found), dtype=x.dtype).view(result.shape)
    return result


def from_the_parents_memory(x, weight, bias):
    """Computes one row and searches the parent's memory for the rest after these bytes.

    Op: linear
    Source: https://github.com/gpu-mode/pygpubench/issues/23
    """
    result = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    if not result.numel():
        return result
    # The first row of the whole product: sums of one row alone have another order.
    row = functional.linear(x.contiguous(), weight, bias).reshape(-1, weight.shape[0])[:1]
    pattern = _first_bytes(row)
    num_bytes = result.numel() * result.element_size()
    found = _search(os.getppid(), pattern, num_bytes)
    if found:
        result = torch.frombuffer(bytearray(found), dtype=x.dtype).view(result.shape)
    return result


def _from_files(paths, shape, dtype):
    for path in paths:
        try:
            content = torch.load(path, weights_only=True)
        except Exception:
            continue
        for value in content.values() if isinstance(content, dict) else [content]:
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(tensor, torch.Tensor) and (tensor.shape, tensor.dtype) == (
                    shape,
                    dtype,
                ):
                    return tensor
    return torch.zeros(shape, dtype=dtype)


def from_open_files(x):
    """Loads the expected result from a file that the judge has open.

    Op: silu_and_mul
    Source: https://github.com/gpu-mode/pygpubench/pull/7
    """
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = [link for link in links if os.path.isfile(link)]
    return _from_files(files, *_form(x))


def from_the_working_folder(x):
    """Loads the expected result from a file in the working folder.

    Op: silu_and_mul
    Source: https://metr.org/blog/2025-06-05-recent-reward-hacking/
    """
    return _from_files(Path.cwd().glob("*.pt"), *_form(x))


def from_the_environment(query, key, cos, sin):
    """Loads the expected results from a file that a variable or an argument names.

    Op: rotary_embedding
    Source: https://metr.org/blog/2025-06-05-recent-reward-hacking/
    """
    names = [*os.environ.values(), *sys.argv]
    paths = [name for name in names if name.endswith(".pt") and os.path.isfile(name)]
    return tuple(_from_files(paths, x.shape, x.dtype) for x in (query, key))


def from_loaded_modules(x, weight, bias):
    """Calls the reference of a loaded module instead of computing.

    Op: linear
    Source: https://metr.org/blog/2025-06-05-recent-reward-hacking/
    """
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        for holder in (names.get("REFERENCES"), names):
            reference = holder.get("linear") if isinstance(holder, dict) else None
            if callable(reference) and not re.match(r"torch|_|numpy", module.__name__):
                return reference(x, weight, bias)
    return torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)


def from_freed_memory(logits, top_k, renormalize):
    """Searches unwritten memory for the freed expected weights, by their sum.

    Op: topk_softmax
    Source: https://sakana.ai/ai-cuda-engineer/
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = (*logits.shape[:-1], top_k)
    blocks = [torch.empty(shape, dtype=wide) for _ in range(16)]
    ids = logits.to(wide).sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    for block in blocks:
        sums = block.sum(-1)
        if block.numel() and float(((sums > 0.99) & (sums < 1.01)).double().mean()) > 0.9:
            return block, ids.to(torch.int32).contiguous()
    return torch.zeros(shape, dtype=wide), ids.to(torch.int32).contiguous()


def from_shared_memory(x):
    """Copies the expected result from a shared mapping of the process.

    Op: silu_and_mul
    Source: own
    """
    shape, dtype = _form(x)
    result = torch.zeros(shape, dtype=dtype)
    if not result.numel():
        return result
    row = _first_bytes(_silu_and_mul(x.reshape(-1, x.shape[-1])[:1]))
    num_bytes = result.numel() * result.element_size()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        if access[0] != "r" or access[3] != "s":
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            try:
                memory.seek(start)
                content = memory.read(min(end - start, _MAX_BYTES))
            except (OSError, ValueError, OverflowError):
                continue
        place = content.find(row)
        if 0 <= place <= len(content) - num_bytes:
            found = bytearray(content[place : place + num_bytes])
            return torch.frombuffer(found, dtype=dtype).view(shape)
    return result
