"""Standard ops and layers: each op is a PyTorch reference, each layer is built from ops."""
