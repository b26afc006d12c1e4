"""Subcommands of ``interposer`` that run, convert or benchmark a model, or manage downloads."""
