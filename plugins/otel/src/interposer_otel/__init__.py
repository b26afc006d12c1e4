"""Traces of what interposer chooses, refuses, loads and measures, through OpenTelemetry."""
