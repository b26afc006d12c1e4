"""The subcommands of core. None of these modules imports torch before its command runs."""
