"""Plugins whose records are well and whose kernels are not."""

from __future__ import annotations

from tests.hostile.case import Hostile, provides
from tests.hostile.native import LOADED

__all__ = ["CASES"]

HEAD = """
import torch


def right(x, weight, eps):
    return torch.rms_norm(x, weight.shape, weight, eps)


"""


def _record(options: str = "", op: str = "rms_norm") -> str:
    """Return the record of a kernel that outranks every other."""
    return f'Kernel("{op}", "{op}_$name", "$package.kernels:{op}", score=1000.0{options})'


PLUGIN = provides(_record())


def _module(name: str, source: str, *words: str, native: str = "") -> Hostile:
    """Return the case of a kernel whose module is ``source``."""
    files = {"plugin.py": PLUGIN, "kernels.py": HEAD + source}
    return Hostile(name, files, words, "kernel", native=native)


def _body(name: str, body: str, *words: str) -> Hostile:
    """Return the case of a kernel with the body ``body``."""
    return _module(name, f"def rms_norm(x, weight, eps):\n    {body}\n", *words)


def _predicate(name: str, body: str, *words: str) -> Hostile:
    record = _record(', predicate="$package.predicate:judge"')
    predicate = f"from interposer import Verdict\n\n\ndef judge(request):\n    {body}\n"
    files = {"plugin.py": provides(record), "predicate.py": predicate}
    files["kernels.py"] = HEAD + "rms_norm = right\n"
    return Hostile(name, files, words, "kernel")


def _prepare(name: str, body: str, *words: str) -> Hostile:
    record = _record(', prepare="$package.kernels:prepare"')
    source = f"{HEAD}rms_norm = right\n\n\ndef prepare(weight):\n    {body}\n"
    return Hostile(name, {"plugin.py": provides(record), "kernels.py": source}, words, "kernel")


CASES = (
    _body("wrong-numerics", "return right(x, weight, eps) * 1.01", "value", "expected"),
    _body("nan-output", "return torch.full_like(x, float('nan'))", "value", "nan"),
    _body("unwritten-output", "return torch.empty_like(x)", "value", "nan"),
    _body("wrong-shape", "return right(x, weight, eps)[..., :-1]", "shape", "expected"),
    _body("wrong-dtype", "return right(x, weight, eps).double()", "dtype", "float64"),
    _body(
        "wrong-strides",
        "return right(x, weight, eps).transpose(0, -1).contiguous().transpose(0, -1)",
        "stride",
    ),
    _body(
        "wrong-structure",
        "return right(x, weight, eps), x.clone()",
        "structure",
        "('Tensor', 'Tensor')",
    ),
    _body("returns-none", "return None", "structure", "None"),
    _body(
        "hidden-mutation",
        "y = right(x, weight, eps); x.mul_(2); return y",
        "argument 'x'",
        "not declared",
    ),
    _body(
        "mutates-weight",
        "y = right(x, weight, eps); weight.add_(1); return y",
        "argument 'weight'",
        "not declared",
    ),
    _body("aliases-input", "return x.copy_(right(x, weight, eps))", "argument 'x'"),
    _module(
        "aliases-earlier",
        "kept = {}\n\n\ndef rms_norm(x, weight, eps):\n"
        "    y = kept.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))\n"
        "    return y.copy_(right(x, weight, eps))\n",
        "second call",
    ),
    _module(
        "second-call",
        "calls = []\n\n\ndef rms_norm(x, weight, eps):\n    calls.append(1)\n"
        "    return right(x, weight, eps) * (1 + (len(calls) % 2 == 0))\n",
        "value",
    ),
    # A row is followed by one of its neighbours in the same storage.
    _body(
        "out-of-bounds",
        "if x.numel():\n"
        "        after = x.storage_offset() + sum(\n"
        "            (size - 1) * step for size, step in zip(x.shape, x.stride())) + 1\n"
        "        x.as_strided((1,), (1,), after).fill_(0)\n"
        "    return right(x, weight, eps)",
        "argument 'x'",
    ),
    Hostile(
        "wrong-slots",
        {
            "plugin.py": provides(_record(op="reshape_and_cache")),
            "kernels.py": "def reshape_and_cache(key, value, keys, values, slots):\n"
            "    keys.flatten(0, 1)[slots - 1] = key\n    values.flatten(0, 1)[slots] = value\n",
        },
        ("argument 'key_cache'", "value"),
        "kernel",
    ),
    _body("kernel-raises", "raise OSError('no such device')", "OSError", "no such device"),
    _body("kernel-exits", "raise SystemExit(9)", "SystemExit(9)"),
    _module("wrong-signature", "def rms_norm(x):\n    return x\n", "TypeError"),
    _module("not-callable", "rms_norm = 42\n", "'int' object is not callable"),
    _module(
        "kernel-import-error", "import no_such_module\nrms_norm = right\n", "ModuleNotFoundError"
    ),
    _module("segfault-load", f"{LOADED}\nrms_norm = right\n", "SIGSEGV", native="crash"),
    _module(
        "segfault-call",
        f"{LOADED}\n\ndef rms_norm(x, weight, eps):\n"
        "    native.crash()\n    return right(x, weight, eps)\n",
        "SIGSEGV",
        native="nothing",
    ),
    _module(
        "loop-call",
        f"{LOADED}\n\ndef rms_norm(x, weight, eps):\n    native.spin()\n",
        "within 1 s, holding the interpreter's lock",
        "running",
        native="nothing",
    ),
    _body("sleep-call", "import time; time.sleep(10)", "within 1 s, waiting", "running"),
    _module(
        "kernel-environment",
        "import os\nos.environ['HOSTILE_SETTING'] = '1'\nrms_norm = right\n",
        "changes the environment",
        "HOSTILE_SETTING",
    ),
    _module(
        "kernel-builtins",
        "import builtins\nbuiltins.len = lambda value: 0\nrms_norm = right\n",
        "builtins.len",
    ),
    _module(
        "kernel-torch",
        "torch.set_default_dtype(torch.float64)\nrms_norm = right\n",
        "torch",
    ),
    _predicate("predicate-raises", "raise OSError('no such device')", "OSError", "no such device"),
    _predicate("predicate-aborts", "import os; os.abort()", "SIGABRT"),
    _predicate("predicate-loops", "\n    while True: pass", "within 1.5 s"),
    _predicate("predicate-bool", "return True", "True", "Verdict"),
    _prepare("prepare-raises", "raise OSError('no memory')", "OSError", "no memory"),
    _prepare("prepare-renames", "return {'scale': weight}", "prepare", "scale"),
    _prepare("prepare-mutates", "return {'weight': weight.add_(1)}", "weight"),
    Hostile(
        "crowd",
        {
            "plugin.py": provides(
                "*(Kernel('rms_norm', f'rms_norm_{number}', '$package.kernels:rms_norm', "
                "score=1e6 + number) for number in range(500))"
            ),
            "kernels.py": "def rms_norm(x, weight, eps):\n    return x * weight\n",
        },
        ("value", "expected"),
        "kernel",
    ),
    Hostile(
        "equal-score",
        {
            "plugin.py": provides(_record().replace("1000.0", "15.0")),
            "kernels.py": HEAD + "rms_norm = right\n",
        },
        ("tie", "15", "provider"),
        "tie",
    ),
)
