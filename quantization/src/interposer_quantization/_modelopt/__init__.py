"""NVIDIA ModelOpt checkpoints."""
