"""The engine: requests, batches, steps and graphs."""
