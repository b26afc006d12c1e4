"""Low-rank adapters (LoRA): read, attached to the layers of a model, and chosen by request."""
