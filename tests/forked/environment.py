"""Make a virtual environment with everything that is installed beside this interpreter.

    python environment.py FOLDER

It has no pip of its own: ``python -m pip --python FOLDER/bin/python`` installs into it. The command
``interposer`` runs as it would from a wheel.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

__all__ = ["make"]

COMMAND = """#!/bin/sh
exec {python} -c 'import sys; del sys.path[0]; from interposer_tools import main; main()' "$@"
"""


def make(folder: Path) -> None:
    """Create the environment in ``folder``."""
    venv.create(folder, with_pip=False, symlinks=True)
    inside = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", inside))
    # Not a path but a call, so that the .pth files of editable installations count as well.
    here = sysconfig.get_path("purelib")
    link = f"import site; site.addsitedir({here!r})\n"
    (packages / "installed_beside.pth").write_text(link, encoding="utf-8")
    program = folder / "bin" / "interposer"
    python = folder.absolute() / "bin" / "python"
    program.write_text(COMMAND.format(python=python), encoding="utf-8")
    program.chmod(0o755)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
