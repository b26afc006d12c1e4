"""The subcommands of ``interposer`` that serve models."""
