"""The subcommands; no module imports torch before the command runs."""
