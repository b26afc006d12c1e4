"""Tensor and expert parallelism: models that several processes compute together."""
