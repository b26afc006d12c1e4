"""Plugins whose module changes the process around it when it is imported."""

from __future__ import annotations

import os

from tests.hostile.case import Hostile, plugin

__all__ = ["CASES"]


def _changes(name: str, body: str, *words: str) -> Hostile:
    return Hostile(name, {"plugin.py": plugin(body)}, words)


_FINDER = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        return None
"""
_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""

CASES: tuple[Hostile, ...] = (
    _changes("close-output", "import os; os.close(1)", "closes the file descriptor 1"),
    _changes("close-input", "import os; os.close(0)", "closes the file descriptor 0"),
    _changes(
        "redirect-errors",
        "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 2)",
        "redirects the file descriptor 2",
    ),
    _changes("close-range", "import os; os.closerange(3, 64)", "closes the file descriptor"),
    _changes(
        "limits",
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))\n",
        "changes the limits of the process",
    ),
    _changes("mask", "import os; os.umask(0o111)", "changes the mask of new files"),
    _changes("priority", "import os; os.nice(1)", "changes the priority of the process"),
    _changes("alarm", "import signal; signal.alarm(3600)", "changes the timers of the process"),
    _changes(
        "block-signals",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        "changes the blocked signals",
    ),
    _changes("fork", "import os\nif os.fork() == 0: os._exit(0)\nos.wait()", "forks the process"),
    _changes("fork-and-stay", "import os, time\nif os.fork() == 0: time.sleep(600)", "forks"),
    _changes("daemon", _DAEMON, "forks the process"),
    _changes(
        "leave-process",
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)",
        "leaves a process running",
    ),
    _changes(
        "kill-examiner",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "the process that examines it ended twice",
    ),
    _changes(
        "replace-torch",
        "import torch\ntorch.nn.functional.linear = lambda x, weight, bias=None: x\n",
        "replaces torch.nn.functional.linear",
    ),
    _changes(
        "replace-method",
        "import torch\ntorch.Tensor.__add__ = lambda one, other: one\n",
        "replaces torch.Tensor.__add__",
    ),
    _changes(
        "replace-ours",
        "import interposer._contract.requires as requires\n"
        "requires.Requires.judge = lambda self, request: True\n",
        "replaces interposer._contract.requires.Requires.judge",
    ),
    _changes(
        "replace-function-of-ours",
        "import interposer._contract.errors as errors\nerrors.described = repr\n",
        "replaces interposer._contract.errors.described",
    ),
    _changes(
        "replace-standard",
        "import os\nos.path.exists = lambda path: True\n",
        "replaces",
        ".exists",
    ),
    _changes(
        "wrapped-standard",
        "import functools, json\njson.dumps = functools.wraps(json.dumps)(lambda *a, **k: '')\n",
        "replaces json.dumps",
    ),
    _changes(
        "replace-thread-hook",
        "import threading; threading.excepthook = lambda facts: None",
        "replaces threading.excepthook",
    ),
    _changes(
        "replace-import", "import builtins; builtins.__import__ = None", "builtins.__import__"
    ),
    _changes(
        "plant-module",
        "import sys, types; sys.modules['flash_attn'] = types.ModuleType('flash_attn')",
        "plants 'flash_attn' in sys.modules",
    ),
    _changes(
        "meta-path",
        f"{_FINDER}\nimport sys\nsys.meta_path.insert(0, Finder())\n",
        "changes sys.meta_path",
    ),
    _changes(
        "path-hooks",
        "import sys\n\ndef hook(path):\n    raise ImportError\n\nsys.path_hooks.insert(0, hook)\n",
        "changes sys.path_hooks",
    ),
    _changes(
        "collector-callback",
        "import gc; gc.callbacks.append(lambda phase, facts: None)",
        "changes the callbacks of the garbage collector",
    ),
    _changes("collector", "import gc; gc.disable()", "changes the garbage collector"),
    _changes("profile", "import sys; sys.setprofile(lambda *facts: None)", "the profile function"),
    _changes(
        "trace", "import sys; sys.settrace(lambda *facts: None)", "changes the trace function"
    ),
    _changes(
        "thread-profile",
        "import threading; threading.setprofile(lambda *facts: None)",
        "changes the profile function of threads",
    ),
    _changes("stack-size", "import threading; threading.stack_size(65536)", "the stack size"),
    _changes(
        "recursion", "import sys; sys.setrecursionlimit(10**6)", "changes the recursion limit"
    ),
    _changes("switches", "import sys; sys.setswitchinterval(10.0)", "changes the switch interval"),
    _changes("digits", "import sys; sys.set_int_max_str_digits(0)", "changes the limit of digits"),
    _changes(
        "filters", "import warnings; warnings.simplefilter('ignore')", "the filters of warnings"
    ),
    _changes("root-logger", "import logging; logging.disable()", "changes the root logger"),
    _changes(
        "logging-handler", "import logging; logging.basicConfig(force=True)", "the root logger"
    ),
    _changes(
        "locale",
        "import locale\n"
        "other = 'C' if locale.setlocale(locale.LC_CTYPE) != 'C' else 'C.UTF-8'\n"
        "locale.setlocale(locale.LC_CTYPE, other)\n",
        "changes the locale",
    ),
    _changes("seed", "import random; random.seed(0)", "changes the state of random"),
    _changes("dlopen", "import sys; sys.setdlopenflags(257)", "changes the flags of dlopen"),
    _changes(
        "at-exit",
        "import atexit, time; atexit.register(time.sleep, 600)",
        "registers a function for the end of the program",
    ),
    _changes(
        "own-base-exception", "class Own(BaseException): pass\nraise Own('why')", "Own('why')"
    ),
    _changes(
        "stack-overflow",
        "import ctypes\n"
        "deep = ctypes.CFUNCTYPE(None)(lambda: deep())\n"
        "import sys; sys.setrecursionlimit(10**9); deep()\n",
        "SIGSEGV",
    ),
)
if len(os.sched_getaffinity(0)) > 1:
    CASES += (
        _changes(
            "processors",
            "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])",
            "changes the processors that it runs on",
        ),
    )
