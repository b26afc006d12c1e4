"""Run the command ``interposer``, for ``python -m interposer_tools``."""

from interposer_tools._cli import main

main()
