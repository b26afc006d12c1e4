"""``python -m interposer`` is the command ``interposer``."""

from interposer.cli import main

main()
