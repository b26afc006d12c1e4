"""The judge: kernels in a process of their own, and a verdict that they cannot reach."""
