"""The asynchronous front: requests of any event loop, stepped by one thread."""
