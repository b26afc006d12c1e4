"""An op, a kernel for it and a layer that binds it."""
