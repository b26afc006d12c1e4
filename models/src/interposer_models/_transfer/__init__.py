"""Weight transfer: a trainer in another process updates the weights of models."""
