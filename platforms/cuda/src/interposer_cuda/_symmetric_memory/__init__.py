"""All-reduce over GPUs that read each other's memory (torch's symmetric memory)."""
