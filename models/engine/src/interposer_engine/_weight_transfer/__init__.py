"""Transfer of weights from a trainer to running models."""
