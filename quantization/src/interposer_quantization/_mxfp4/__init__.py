"""gpt-oss checkpoints with MXFP4 experts."""
