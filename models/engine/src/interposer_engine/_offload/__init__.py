"""Weight offload: blocks whose weights are streamed from host memory or disk."""
