"""The subcommands. None of these modules imports torch before its command runs."""
