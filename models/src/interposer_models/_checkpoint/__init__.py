"""Checkpoints: files, tensors, and the loading of weights into layers."""
