"""The CPU as a platform: what it can do, and kernels made of torch's own operators."""
