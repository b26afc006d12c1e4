"""Plugins whose module changes what interpreter, torch and process share with everybody."""

from __future__ import annotations

from tests.hostile.case import Hostile, plugin

__all__ = ["CASES"]


def _changes(name: str, body: str, *words: str) -> Hostile:
    return Hostile(name, {"plugin.py": plugin(body)}, words)


_MODE = """
import torch
from torch.{module} import {mode}


class Mode({mode}):
    def __torch_{kind}__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {{}}))


mode = Mode()
mode.__enter__()
"""

CASES = (
    _changes(
        "fuse",
        "import faulthandler, os\n"
        "faulthandler.dump_traceback_later(5, exit=True, file=open(os.devnull, 'w'))\n",
        "sets a time at which faulthandler ends the process",
    ),
    _changes(
        "exit-at-exit",
        "import atexit, os; atexit.register(os._exit, 9)",
        "registers a function for the end of the program",
    ),
    _changes(
        "exit-of-threads",
        "import threading, time; threading._register_atexit(time.sleep, 600)",
        "within 1.5 s",
        "ending the process",
    ),
    _changes(
        "fault-handler", "import faulthandler; faulthandler.disable()", "changes the fault handler"
    ),
    _changes("collector-debug", "import gc; gc.set_debug(gc.DEBUG_STATS)", "garbage collector"),
    _changes(
        "no-privileges",
        "import ctypes; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)",
        "changes the rights of the process",
    ),
    _changes(
        "signal-in-c",
        "import ctypes; ctypes.CDLL(None).signal(12, ctypes.c_void_p(1))",
        "changes the signals it minds",
    ),
    _changes(
        "wakeup",
        "import os, signal\n_, end = os.pipe()\nos.set_blocking(end, False)\n"
        "signal.set_wakeup_fd(end)\n",
        "sets a file descriptor for signals",
    ),
    _changes("import-lock", "import _imp; _imp.acquire_lock()", "changes the lock of imports"),
    _changes(
        "codec-errors",
        "import codecs; codecs.register_error('strict', lambda error: ('', error.end))",
        "changes the handlers of codecs' errors",
    ),
    _changes("arguments", "import sys; sys.argv[:] = ['mine']", "changes sys.argv"),
    _changes("input", "import io, sys; sys.stdin = io.StringIO()", "replaces sys.stdin"),
    _changes("all-modules", "import sys; sys.modules = {**sys.modules}", "replaces sys.modules"),
    _changes("all-finders", "import sys; sys.meta_path = []", "replaces sys.meta_path"),
    _changes("all-variables", "import os; os.environ = {**os.environ}", "replaces os.environ"),
    _changes("short-tracebacks", "import sys; sys.tracebacklimit = 0", "sys.tracebacklimit"),
    _changes("bytecode-folder", "import sys; sys.pycache_prefix = '/x'", "sys.pycache_prefix"),
    _changes(
        "async-hooks",
        "import sys; sys.set_asyncgen_hooks(firstiter=lambda generator: None)",
        "changes the hooks of asynchronous generators",
    ),
    _changes(
        "coroutine-origins",
        "import sys; sys.set_coroutine_origin_tracking_depth(50)",
        "changes the origins of coroutines",
    ),
    _changes("constant", "import math; math.pi = 3", "replaces math.pi"),
    _changes(
        "torch-constant", "import torch; torch.float32 = torch.float64", "replaces torch.float32"
    ),
    _changes(
        "replace-pluggy",
        "import pluggy; pluggy.PluginManager.register = lambda self, plugin, name=None: None",
        "replaces pluggy._manager.PluginManager.register",
    ),
    _changes(
        "replace-pydantic",
        "import pydantic\n"
        "pydantic.BaseModel.model_validate = classmethod(lambda cls, value: value)\n",
        "replaces pydantic.main.BaseModel.model_validate",
    ),
    _changes(
        "replace-packaging",
        "import packaging.version\npackaging.version.Version.__init__ = lambda self, text: None\n",
        "replaces packaging.version.Version.__init__",
    ),
    _changes(
        "hide-the-rest",
        "import importlib_metadata; importlib_metadata.distributions = lambda **options: []",
        "importlib_metadata.distributions",
    ),
    _changes(
        "logger-class",
        "import logging\n\n\nclass Logger(logging.Logger):\n    pass\n\n\n"
        "logging.setLoggerClass(Logger)\n",
        "logging._loggerClass",
    ),
    _changes(
        "our-logger",
        "import logging; logging.getLogger('interposer').disabled = True",
        "changes the logger of interposer",
    ),
    _changes(
        "aten",
        "import torch\nlibrary = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('silu', lambda x: x, 'CPU')\n",
        "changes torch's kernels of aten",
    ),
    _changes(
        "module-hook",
        "import torch\ntorch.nn.modules.module.register_module_forward_hook(lambda *facts: None)\n",
        "changes torch's hooks of all modules",
    ),
    _changes(
        "function-mode",
        _MODE.format(module="overrides", mode="TorchFunctionMode", kind="function"),
        "changes torch's stack of function modes",
    ),
    _changes(
        "dispatch-mode",
        _MODE.format(module="utils._python_dispatch", mode="TorchDispatchMode", kind="dispatch"),
        "changes torch's stack of dispatch modes",
    ),
    _changes(
        "autocast", "import torch; torch.set_autocast_enabled('cpu', True)", "torch's autocast"
    ),
    _changes(
        "inference",
        "import torch\nguard = torch.inference_mode()\nguard.__enter__()\n",
        "changes torch's gradient mode",
    ),
    _changes(
        "reference",
        "from interposer_ops.norms._norms import rms_norm\n"
        "rms_norm.reference = lambda x, weight, eps: x\n",
        "rms_norm.reference",
    ),
    # These do not come back, or come back as something else.
    _changes("stop", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "within 1.5 s"),
    _changes("kill-group", "import os, signal; os.killpg(0, signal.SIGKILL)", "SIGKILL"),
    _changes("much-memory", "bytearray(1 << 46)", "MemoryError"),
    _changes("deep", "def down(): down()\ndown()\n", "RecursionError"),
    _changes(
        "endless-forks",
        "import os, time\nend = time.monotonic() + 20\nif os.fork() == 0:\n    os.setsid()\n"
        "    while time.monotonic() < end:\n        if os.fork():\n            os._exit(0)\n"
        "    os._exit(0)\n",
        "forks the process",
    ),
)
