"""Weights of a trainer in another process, over a process group of torch.distributed."""
