"""Trials: one candidate on one case in one respect, run here or in other processes."""
