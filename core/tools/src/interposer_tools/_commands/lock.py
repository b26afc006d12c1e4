"""The subcommand ``interposer lock``, which records the installed plugins in a lock file."""

from __future__ import annotations

from typing import Annotated

import typer


def lock(
    check: Annotated[
        bool, typer.Option("--check", help="Only compare the installed plugins with the lock file.")
    ] = False,
) -> None:
    """Record the installed plugin distributions in interposer.lock, which --locked enforces."""
    from interposer import effective_config
    from interposer.tooling import Lock, check_lock, installed_distributions, lock_path

    config = effective_config()
    distributions, path = installed_distributions(), lock_path(config)
    if check:
        check_lock(config, distributions)
        print(f"{path}: {len(distributions)} distributions are as locked")
    else:
        Lock.of(distributions).write(path)
        print(f"{path}: {len(distributions)} distributions are locked")
