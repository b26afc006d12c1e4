"""The subcommands. No module imports torch before the command runs."""
