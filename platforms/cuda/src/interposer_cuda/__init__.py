"""GPUs of NVIDIA as a platform: what they can do, graphs of a step, and kernels of torch's own."""
