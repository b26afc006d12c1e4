"""Trials: tests of one candidate on one case, run in this process or in child processes."""
