"""Tensor parallelism: each rank holds a shard of a layer, and collectives combine the results."""
