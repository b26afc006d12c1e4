"""Weight offload: decoder blocks whose weights are streamed from host memory or disk."""
