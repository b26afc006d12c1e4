"""``python -m interposer_tools`` is the command ``interposer``."""

from interposer_tools._cli import main

main()
