"""Parts shared by the linear layers of several formats: packing, rounding and kernel binding."""
