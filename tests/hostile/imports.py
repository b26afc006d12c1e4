"""Plugins whose module does harm when it is imported."""

from __future__ import annotations

from tests.hostile.case import Hostile, plugin
from tests.hostile.native import LOADED

__all__ = ["CASES"]


def _on_import(name: str, body: str, *words: str, native: str = "", alone: bool = False) -> Hostile:
    files = {"plugin.py": plugin(body)}
    return Hostile(name, files, words, native=native, needs_compiler=alone)


CASES = (
    _on_import("import-error", "import no_such_module", "ModuleNotFoundError", "no_such_module"),
    _on_import("syntax-error", "def broken(:\n", "SyntaxError"),
    _on_import("null-bytes", "\0", "null bytes"),
    _on_import("system-exit", "import sys; sys.exit('no licence')", "SystemExit", "no licence"),
    _on_import("interrupt", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    _on_import(
        "mute-error",
        "class Mute(Exception):\n"
        "    def __repr__(self):\n        raise self\n    __str__ = __repr__\nraise Mute\n",
        "Mute",
    ),
    _on_import("os-exit", "import os; os._exit(7)", "importing", "exited", "7"),
    _on_import("os-exit-zero", "import os; os._exit(0)", "importing", "exited"),
    _on_import("abort", "import os; os.abort()", "importing", "SIGABRT"),
    _on_import("segfault-import", LOADED, "importing", "SIGSEGV", native="crash"),
    _on_import("illegal-import", LOADED, "importing", "SIGILL", native="illegal", alone=True),
    # The child holds copies of every file that its parent has open.
    _on_import(
        "fork-and-abort",
        "import os, time\nif os.fork() == 0:\n    time.sleep(20); os._exit(0)\nos.abort()\n",
        "SIGABRT",
    ),
    _on_import(
        "loop-import",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass\n",
        "importing",
        "within 1.5 s",
    ),
    _on_import("sleep-import", "import time; time.sleep(600)", "importing", "within 1.5 s"),
    _on_import("prints", "print('HOSTILE OUTPUT')", "prints"),
    _on_import("prints-native", "import os; os.write(1, b'HOSTILE OUTPUT')", "prints"),
    _on_import(
        "environment",
        "import os; os.environ['HOSTILE_SETTING'] = '1'; del os.environ['PATH']",
        "changes the environment",
        "HOSTILE_SETTING",
        "PATH",
    ),
    _on_import(
        "builtins",
        "import builtins\nbuiltins.print = lambda *values, **options: None\n",
        "replaces builtins.print",
    ),
    _on_import(
        "modules",
        "import json, sys, types\nsys.modules['json'] = types.ModuleType('json')\n",
        "replaces the module 'json'",
    ),
    _on_import("directory", "import os; os.chdir('/')", "changes the working directory"),
    _on_import("search-path", "import sys; sys.path.insert(0, '/hostile')", "changes sys.path"),
    _on_import("stream", "import io, sys; sys.stdout = io.StringIO()", "sys.stdout"),
    _on_import(
        "signal",
        "import signal; signal.signal(signal.SIGINT, lambda *facts: None)",
        "handler for SIGINT",
    ),
    _on_import(
        "thread",
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), name='hostile', daemon=True).start()\n",
        "leaves the thread 'hostile'",
    ),
    _on_import(
        "lasting-thread",
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), name='hostile lasting').start()\n",
        "leaves the thread 'hostile lasting'",
    ),
)
