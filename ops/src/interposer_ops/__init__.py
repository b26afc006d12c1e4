"""Standard ops and layers: every op is a plain PyTorch reference, every layer binds ops."""
