"""Adaptation of transformers models: structure proposes a kernel for a module, a trial decides."""
