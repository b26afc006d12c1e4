"""Plugins whose metadata or statements of versions are false, missing or do not fit."""

from __future__ import annotations

from tests.hostile.case import Hostile, plugin, provides

__all__ = ["CASES"]

RECORD = 'Kernel("rms_norm", "rms_norm_$name", "$package.kernels:rms_norm", score=1000.0)'
KERNEL = "from interposer_ops.norms._norms import rms_norm as op\n\nrms_norm = op.reference\n"
# Everything in it is well but what a case says.
FILES = {"plugin.py": provides(RECORD), "kernels.py": KERNEL}
# As well, but it outranks nobody: only the lock refuses it.
LOCKED = {"plugin.py": provides(RECORD.replace("1000.0", "1.0")), "kernels.py": KERNEL}
LOCKED["notes.txt"] = "read by nobody"


def _states(name: str, line: str, *words: str) -> Hostile:
    files = {**FILES, "plugin.py": FILES["plugin.py"].replace('INTERPOSER_API = ">=1.0,<2"', line)}
    return Hostile(name, files, words)


CASES = (
    _states("other-api", "INTERPOSER_API = '>=2,<3'", ">=2,<3", "1.0"),
    _states("no-api", "", "INTERPOSER_API"),
    _states("nonsense-api", "INTERPOSER_API = 'the newest'", "INTERPOSER_API", "the newest"),
    _states("number-api", "INTERPOSER_API = 1.0", "INTERPOSER_API", "1.0"),
    _states("stated-torch", "INTERPOSER_API = '>=1.0'\nINTERPOSER_TORCH = '<2'", "torch", "<2"),
    Hostile("other-interposer", FILES, ("interposer", ">=99"), requires=("interposer>=99",)),
    Hostile("other-torch", FILES, ("torch", "<1"), requires=("torch<1",)),
    Hostile("missing-part", FILES, ("interposer-teapot",), requires=("interposer-teapot>=1",)),
    Hostile("foreign-module", FILES, ("healthy_norm.plugin",), value="healthy_norm.plugin"),
    Hostile("missing-module", FILES, ("$package.elsewhere",), value="$package.elsewhere"),
    Hostile("missing-attribute", FILES, ("elsewhere",), value="$package.plugin:elsewhere"),
    Hostile("nonsense-entry", FILES, ("not a module!",), value="not a module!"),
    Hostile("nameless", FILES, ("metadata",), altered={"$info/METADATA": ""}, unnamed=True),
    Hostile(
        "without-metadata", FILES, ("metadata",), altered={"$info/METADATA": None}, unnamed=True
    ),
    # Parts of the SDK are not examined: nobody else may pass for one.
    Hostile(
        "stolen-name",
        {"plugin.py": plugin("import os; os.abort()")},
        ("metadata", "interposer-ops"),
        altered={"$info/METADATA": "Metadata-Version: 2.1\nName: interposer-ops\nVersion: 0.1\n"},
        unnamed=True,
    ),
    Hostile(
        "versionless",
        FILES,
        ("version",),
        altered={"$info/METADATA": "Metadata-Version: 2.1\nName: hostile-versionless\n"},
    ),
    Hostile(
        "nonsense-requirement",
        FILES,
        ("interposer ~~ new",),
        altered={
            "$info/METADATA": "Metadata-Version: 2.1\nName: hostile-nonsense-requirement\n"
            "Version: 1.0\nRequires-Dist: interposer ~~ new\n"
        },
    ),
    Hostile(
        "deep-requirement",
        FILES,
        ("cannot be understood",),
        altered={
            "$info/METADATA": "Metadata-Version: 2.1\nName: hostile-deep-requirement\n"
            "Version: 1.0\nRequires-Dist: interposer; "
            f"{'(' * 50_000}os_name == 'x'{')' * 50_000}\n"
        },
    ),
    Hostile(
        "digits-in-version",
        FILES,
        ("its metadata states the version '1.0000",),
        altered={
            "$info/METADATA": "Metadata-Version: 2.1\nName: hostile-digits-in-version\n"
            f"Version: 1.{'0' * 100_000}\n"
        },
    ),
    Hostile(
        "altered-file",
        LOCKED,
        ("LockError", "hostile-altered-file", "$package/notes.txt"),
        "lock",
        altered={"$package/notes.txt": "changed"},
    ),
    Hostile(
        "deleted-file",
        LOCKED,
        ("LockError", "hostile-deleted-file", "$package/notes.txt"),
        "lock",
        altered={"$package/notes.txt": None},
    ),
    Hostile(
        "duplicate-one",
        FILES,
        ("'hostile-duplicate'", "hostile-duplicate-two"),
        plugin="hostile-duplicate",
        beside=("duplicate-two",),
    ),
    Hostile(
        "duplicate-two",
        FILES,
        ("'hostile-duplicate'", "hostile-duplicate-one"),
        plugin="hostile-duplicate",
        beside=("duplicate-one",),
    ),
    Hostile(
        "entry-points-huge",
        FILES,
        ("entry_points.txt has", "characters; 100,000 are allowed"),
        altered={
            "$info/entry_points.txt": "[interposer.plugins]\n"
            + "".join(f"huge-{number} = hostile_huge.plugin\n" for number in range(5_000))
        },
    ),
    Hostile(
        "many-plugins",
        FILES,
        ("announces 101 plugins; 100 are allowed",),
        altered={
            "$info/entry_points.txt": "[interposer.plugins]\n"
            + "".join(f"many-{number} = hostile_many.plugin\n" for number in range(101))
        },
    ),
    # An upgrade that was broken off leaves such behind.
    Hostile(
        "twin",
        {"plugin.py": LOCKED["plugin.py"], "kernels.py": KERNEL},
        ("two distributions of the name 'hostile-twin'", "1.0 in", "which is used, and 2.0 in"),
        altered={
            "$package-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hostile-twin\n"
            "Version: 2.0\n",
            "$package-2.0.dist-info/entry_points.txt": "[interposer.plugins]\n"
            "hostile-twin = $package.plugin\n",
        },
        loads=True,
    ),
    Hostile("standard-name", FILES, ("'ops'", "interposer-ops"), plugin="ops"),
    Hostile(
        "unicode-plugin",
        FILES,
        ("out of A-Z, a-z, 0-9, '_', '.' and '-'",),
        plugin="\u202e名前-\N{SNOWMAN}",
    ),
    Hostile(
        "shell-plugin",
        FILES,
        ("its name is 'a; touch hostile #'",),
        plugin="a; touch hostile #",
    ),
    Hostile("long-plugin", FILES, ("at most 100 characters",), plugin="long" * 1000),
)
