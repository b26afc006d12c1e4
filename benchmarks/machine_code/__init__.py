"""Inner loops of compiled kernels: found in object files, and timed by models of processors."""
