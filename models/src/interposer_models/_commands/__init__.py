"""The subcommands that run models."""
