"""Plugins whose records are well and whose kernels are not."""

from __future__ import annotations

from tests.hostile.case import Hostile, provides
from tests.hostile.native import LOADED

__all__ = ["CASES"]

HEAD = """
import ctypes
import os
import threading
import time

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


# One element of this many bytes beside what the case covers is on the other side of a fence.
BEYOND = (
    "end = 4 * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0)\n"
    "    start = x.data_ptr() - 4 * x.storage_offset()\n"
    "    end = x.data_ptr() + end + 64\n    "
)

_CHANGES = (
    _body(
        "reads-behind",
        f"{BEYOND}ctypes.string_at(end, 1); return right(x, weight, eps)",
        "SIGSEGV while running",
    ),
    _body(
        "writes-behind",
        f"{BEYOND}ctypes.memset(end, 0, 1); return right(x, weight, eps)",
        "SIGSEGV while running",
    ),
    _module(
        "reads-before",
        "calls = []\n\n\ndef rms_norm(x, weight, eps):\n    calls.append(1)\n"
        f"    {BEYOND}\n    if len(calls) % 2 == 0: ctypes.string_at(start - 65 * 4, 1)\n"
        "    return right(x, weight, eps)\n",
        "SIGSEGV while running",
    ),
    _body(
        "draws",
        "torch.rand(1); return right(x, weight, eps)",
        "changes the state of torch's generator",
    ),
    _body(
        "seeds",
        "torch.manual_seed(1234); return right(x, weight, eps)",
        "changes the state of torch's generator",
    ),
    _body(
        "draws-python",
        "import random; random.random(); return right(x, weight, eps)",
        "changes the state of random",
    ),
    _body(
        "forks-in-a-call",
        "os.fork() or os._exit(0); return right(x, weight, eps)",
        "forks the process",
    ),
    _body(
        "thread-in-a-call",
        "threading.Thread(target=time.sleep, args=(600,), name='mine', daemon=True).start()\n"
        "    return right(x, weight, eps)",
        "leaves the thread 'mine' running",
    ),
    _body(
        "closes-in-a-call",
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 1); return right(x, weight, eps)",
        "redirects the file descriptor 1",
    ),
    _body(
        "own-error-in-a-call",
        "raise type('Own', (BaseException,), {})('why')",
        "Own('why')",
    ),
    _module(
        "never-ends",
        "import atexit\natexit.register(time.sleep, 600)\nrms_norm = right\n",
        "within 1.5 s",
        "ending the process",
    ),
    _module(
        "crashes-at-the-end",
        "import atexit\natexit.register(os.abort)\nrms_norm = right\n",
        "SIGABRT while ending the process",
    ),
    _module(
        "waits-for-a-thread",
        "threading.Thread(target=time.sleep, args=(600,)).start()\nrms_norm = right\n",
        "within 1.5 s",
        "ending the process",
    ),
    _module(
        "kernel-functional",
        "import functools\nfrom torch.nn import functional\n"
        "functional.silu = functools.wraps(functional.silu)(lambda x: x)\nrms_norm = right\n",
        "replaces torch.nn.functional.silu",
    ),
    _module(
        "kernel-swaps",
        "from torch.nn import functional\nfunctional.silu = functional.relu\nrms_norm = right\n",
        "replaces torch.nn.functional.silu",
    ),
    _module(
        "kernel-filters",
        "import warnings\nwarnings.simplefilter('ignore')\nrms_norm = right\n",
        "changes the filters of warnings",
    ),
    _module(
        "kernel-finder",
        "import sys\n\nclass Finder:\n    def find_spec(self, *facts):\n        return None\n\n"
        "sys.meta_path.append(Finder())\nrms_norm = right\n",
        "changes sys.meta_path",
    ),
    _module(
        "kernel-plants",
        "import sys, types\nsys.modules['flash_attn'] = types.ModuleType('flash_attn')\n"
        "rms_norm = right\n",
        "plants 'flash_attn' in sys.modules",
    ),
    _module(
        "kernel-denormals",
        "torch.set_flush_denormal(True)\nrms_norm = right\n",
        "changes the arithmetic of floats",
    ),
    _module(
        "kernel-deterministic",
        "torch.use_deterministic_algorithms(True)\nrms_norm = right\n",
        "changes torch's deterministic mode",
    ),
    _module(
        "kernel-threads",
        "torch.set_num_threads(torch.get_num_threads() + 1)\nrms_norm = right\n",
        "changes torch's number of threads",
    ),
    _module(
        "kernel-attention",
        "torch.backends.cuda.enable_flash_sdp(False)\nrms_norm = right\n",
        "changes torch's switch of flash attention",
    ),
    _module(
        "kernel-limits",
        "import resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))\nrms_norm = right\n",
        "changes the limits of the process",
    ),
)

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
    _body("sleep-call", "import time; time.sleep(600)", "within 1 s, waiting", "running"),
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
    *_CHANGES,
    _module(
        "kernel-exit-at-exit",
        "import atexit; atexit.register(os._exit, 0)\nrms_norm = right\n",
        "exited with code 0 while ending the process",
    ),
    _module(
        "kernel-fuse",
        "import faulthandler\nsink = open(os.devnull, 'w')\n"
        "faulthandler.dump_traceback_later(30, exit=True, file=sink)\nrms_norm = right\n",
        "sets a time at which faulthandler ends the process",
    ),
    _module(
        "kernel-aten",
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('silu', lambda x: x, 'CPU')\nrms_norm = right\n",
        "changes torch's kernels of aten",
    ),
    _module(
        "kernel-module-hook",
        "hooks = torch.nn.modules.module\n"
        "hooks.register_module_forward_hook(lambda *facts: None)\nrms_norm = right\n",
        "changes torch's hooks of all modules",
    ),
    _body(
        "kernel-mode",
        "torch.overrides.BaseTorchFunctionMode().__enter__()\n    return right(x, weight, eps)",
        "changes torch's stack of function modes",
    ),
    _body(
        "kernel-autocast",
        "torch.set_autocast_enabled('cpu', True)\n    return right(x, weight, eps)",
        "changes torch's autocast",
    ),
    _body(
        "kernel-constant",
        "torch.inf = 3.0\n    return right(x, weight, eps)",
        "replaces torch.inf",
    ),
    _body(
        "kernel-stops",
        "import signal; os.kill(os.getpid(), signal.SIGSTOP)\n    return right(x, weight, eps)",
        "within 1 s",
    ),
    _body(
        "kernel-frees",
        "x.untyped_storage().resize_(0)\n    return weight",
        "departs from the reference",
    ),
    _module(
        "kernel-reference",
        "from interposer_ops.norms._norms import rms_norm as op\n"
        "op.reference = lambda x, weight, eps: x\n\n\n"
        "def rms_norm(x, weight, eps):\n    return x.clone()\n",
        "rms_norm.reference",
    ),
    _module(
        "kernel-shows-nothing",
        "class Any:\n    def __getattr__(self, name): raise OSError(name)\n\n\n"
        "def rms_norm(x, weight, eps):\n    return Any()\n",
        "structure",
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
