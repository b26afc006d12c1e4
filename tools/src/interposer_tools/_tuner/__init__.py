"""The tuner: candidates are timed on this host, so that the fastest is chosen."""
