"""Weight offload: weights in host memory or on the disk, read when their block computes."""
