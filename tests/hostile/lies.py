"""Plugins whose objects are not what they say: errors, modules, records, hooks, platforms."""

from __future__ import annotations

from tests.hostile.case import Hostile, plugin, provides

__all__ = ["CASES"]

BACKEND = """
from interposer import Verdict
from interposer_ops.layers.attention import PagedBackend


class Backend(PagedBackend):
    @classmethod
    def accepts(cls, spec, capability):
        return Verdict.accept()
"""
REQUIRES = ", '', requires"
SCORE = ", score=float('nan')"
KERNEL = "Kernel('rms_norm', 'rms_norm_$name', '$package.plugin:hookimpl'{})"


def _module(name: str, body: str, *words: str, value: str = "$package.plugin") -> Hostile:
    return Hostile(name, {"plugin.py": plugin(body)}, words, value=value)


def _records(name: str, body: str, *words: str) -> Hostile:
    return _module(name, f"@hookimpl\ndef interposer_records():\n    {body}\n", *words)


def _observer(name: str, hook: str, body: str, *words: str) -> Hostile:
    source = plugin(f"@hookimpl\ndef {hook}:\n    {body}\n")
    return Hostile(name, {"plugin.py": source}, words, "observer")


def _pages(name: str, pages: str) -> Hostile:
    record = (
        'AttentionEntry("attention_$name", "$package.attention:Backend", score=1000.0, '
        f"page_sizes={pages})"
    )
    files = {"plugin.py": provides(record), "attention.py": BACKEND}
    return Hostile(name, files, ("page_sizes that are no tuple of at most 64 ints",))


CASES = (
    _module(
        "error-of-no-class",
        "class Own(Exception):\n    __class__ = property(lambda self: 1 / 0)\n\n\n"
        "raise Own('why')\n",
        "Own('why')",
    ),
    _module(
        "error-of-odd-text",
        "class Text(str):\n    def __format__(self, spec): raise OSError\n\n\n"
        "class Own(Exception):\n    def __repr__(self): return Text('odd')\n\n\nraise Own\n",
        "raised odd",
    ),
    _module(
        "error-group",
        "raise BaseExceptionGroup('many', [ValueError(number) for number in range(20_000)])",
        "many",
    ),
    _module(
        "error-chain",
        "error = None\nfor number in range(3000):\n    last, error = error, ValueError(number)\n"
        "    error.__cause__ = last\nraise error\n",
        "ValueError(2999)",
    ),
    _module("error-markup", "raise OSError('[/bold][link=x] %s {0}')", "[/bold][link=x] %s {0}"),
    _module(
        "any-attribute",
        "def __getattr__(name):\n    raise OSError(name)\n",
        "OSError",
    ),
    _module("no-list", "def __dir__():\n    raise OSError('no list')\n", "no list"),
    _module(
        "other-module",
        "import sys\n\n\nclass Any:\n    INTERPOSER_API = '>=1.0'\n"
        "    def __getattr__(self, name): return self\n"
        "    def __call__(self, *facts): return self\n\n\nsys.modules[__name__] = Any()\n",
        "INTERPOSER_TORCH is of type Any",
    ),
    _module(
        "object-raises",
        "class Any:\n    def __getattribute__(self, name): raise RuntimeError(name)\n\n\n"
        "PLUGIN = Any()\n",
        "RuntimeError('INTERPOSER_API')",
        value="$package.plugin:PLUGIN",
    ),
    _module(
        "api-of-no-text",
        "class Text(str):\n    def __eq__(self, other): raise OSError\n    __hash__ = None\n\n\n"
        "INTERPOSER_API = Text('>=1.0')\n",
        "INTERPOSER_API is of type Text",
    ),
    _module(
        "api-huge", "INTERPOSER_API = '>=1.0,' * 1_000_000 + '<2'", "INTERPOSER_API is '>=1.0,>=1.0"
    ),
    _records(
        "record-of-subclass",
        "class Other(Kernel):\n        __slots__ = ()\n"
        "        name = property(lambda self: 1 / 0)\n"
        "    return [object.__new__(Other)]",
        "'Other', which is not a record",
    ),
    _records("record-empty", "return [object.__new__(Kernel)]", "without a name"),
    _records(
        "score-lies",
        "class Number(float):\n        def __lt__(self, other): raise OSError\n"
        f"    return [{KERNEL.format(', score=Number(5)')}]",
        "not a finite number",
    ),
    _records("score-nan", f"return [{KERNEL.format(SCORE)}]", "not a number"),
    _records(
        "records-fail-late",
        f"yield {KERNEL.format('')}; raise KeyboardInterrupt('late')",
        "KeyboardInterrupt('late')",
    ),
    _records(
        "records-end",
        "class Records:\n        def __iter__(self): return self\n"
        "        def __next__(self): raise GeneratorExit('late')\n    return Records()",
        "GeneratorExit('late')",
    ),
    _records(
        "requires-lie",
        "import itertools\n    requires = Requires()\n"
        "    object.__setattr__(requires, 'features', itertools.count())\n"
        f"    return [{KERNEL.format(REQUIRES)}]",
        "no frozenset of texts",
    ),
    _module(
        "coroutine", "@hookimpl\nasync def interposer_records():\n    return []\n", "coroutine"
    ),
    _observer(
        "observer-ends",
        "interposer_finished(activity)",
        "raise GeneratorExit('mine')",
        "interposer_finished raised GeneratorExit('mine')",
    ),
    _observer(
        "observer-error-lies",
        "interposer_selected(choice)",
        "class Own(BaseException):\n        __class__ = property(lambda self: 1 / 0)\n"
        "        def __str__(self): raise self\n        __repr__ = __str__\n    raise Own",
        "interposer_selected raised Own(...)",
    ),
    _observer(
        "observer-recurses",
        "interposer_selected(choice)",
        "interposer_selected(choice)",
        "interposer_selected raised RecursionError",
    ),
    _observer(
        "observer-registers",
        "interposer_selected(choice)",
        "from types import SimpleNamespace\n    from interposer import register\n"
        "    register(SimpleNamespace(), name='another')",
        "interposer_selected raised PluginError",
    ),
    _pages("pages-zero", "(0,)"),
    _pages("pages-text", "('16',)"),
    _pages("pages-none", "None"),
    _pages("pages-range", "range(1, 10**12)"),
    _pages("pages-float", "(16.0,)"),
    _pages("pages-bool", "(True,)"),
    _pages("pages-huge", "(10**12,)"),
    _pages("pages-many", "tuple(range(1, 1000))"),
)
