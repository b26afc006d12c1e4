"""OpenTelemetry traces of choices, refusals, model loads and kernel measurements of interposer."""
