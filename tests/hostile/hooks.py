"""Plugins whose hooks are not hooks, raise, never return or return nonsense."""

from __future__ import annotations

from tests.hostile.case import Hostile, plugin

__all__ = ["CASES"]

KERNEL = 'Kernel("rms_norm", f"rms_norm_{number}", "$package.plugin:hookimpl")'


def _hook(name: str, body: str, *words: str) -> Hostile:
    source = f"\n\n@hookimpl\ndef interposer_records():\n    {body}\n"
    return Hostile(name, {"plugin.py": plugin(source)}, words)


def _observer(name: str, fact: str, change: str) -> Hostile:
    source = f"\n\n@hookimpl\ndef interposer_selected({fact}):\n    object.__setattr__({change})\n"
    words = ("interposer_selected", f"changes the {fact} that it receives")
    return Hostile(name, {"plugin.py": plugin(source)}, words, "observer")


CASES = (
    Hostile(
        "hook-arguments",
        {"plugin.py": plugin("\n\n@hookimpl\ndef interposer_records(secret):\n    return []\n")},
        ("interposer_records", "secret"),
    ),
    Hostile(
        "unknown-hook",
        {"plugin.py": plugin("\n\n@hookimpl\ndef interposer_recordz():\n    return []\n")},
        ("interposer_recordz",),
    ),
    _hook("hook-raises", "raise OSError('no such library')", "OSError", "no such library"),
    _hook("hook-exits", "raise SystemExit(3)", "SystemExit(3)"),
    _hook("hook-none", "return None", "None"),
    _hook("hook-number", "return 42", "interposer_records", "returned int"),
    _hook("hook-strings", "return ['rms_norm', 'linear']", "'str'", "not a record"),
    _hook("hook-loops", "\n    while True: pass", "within 1.5 s"),
    _hook("hook-aborts", "import os; os.abort()", "SIGABRT"),
    _hook("hook-prints", "print('HOSTILE OUTPUT'); return []", "prints"),
    _hook(
        "hook-endless",
        f"from itertools import count; return ({KERNEL} for number in count())",
        "1,000",
    ),
    _hook(
        "hook-stalls",
        f"number = 1; yield {KERNEL}\n    while True: pass",
        "within 1.5 s",
    ),
    _hook(
        "mute-record",
        "return [type('Mute', (), {'__repr__': lambda self: 1 / 0})()]",
        "record",
    ),
    _hook(
        "false-record",
        "record = Kernel('rms_norm', 'rms_norm_false', 'hostile_false.kernels:rms_norm')\n"
        "    object.__setattr__(record, 'score', 'high')\n"
        "    object.__setattr__(record, 'requires', None)\n    return [record]",
        "rms_norm_false",
    ),
    Hostile(
        "observer-raises",
        {
            "plugin.py": plugin(
                "\n\n@hookimpl\ndef interposer_selected(choice):\n    raise OSError('no disk')\n"
            )
        },
        ("interposer_selected", "no disk"),
        "observer",
    ),
    Hostile(
        "observer-own-error",
        {
            "plugin.py": plugin(
                "\n\nclass Own(BaseException):\n    pass\n\n\n"
                "@hookimpl\ndef interposer_selected(choice):\n    raise Own('no disk')\n"
            )
        },
        ("interposer_selected", "Own('no disk')"),
        "observer",
    ),
    _observer("observer-overwrites", "choice", "choice, 'why', 'it is mine'"),
    _observer("observer-redirects", "choice", "choice.chosen.record, 'target', 'mine:kernel'"),
    Hostile(
        "observer-adds",
        {
            "plugin.py": plugin(
                "\n\n@hookimpl\ndef interposer_finished(facts):\n    facts['mine'] = 1\n"
            )
        },
        ("interposer_finished", "changes the facts"),
        "observer",
    ),
    Hostile(
        "observer-exits",
        {
            "plugin.py": plugin(
                "\n\n@hookimpl\ndef interposer_finished(activity):\n    raise SystemExit(5)\n"
            )
        },
        ("interposer_finished", "SystemExit(5)"),
        "observer",
    ),
)
