"""The judge: untrusted kernels run in another process, and the judge's own process decides."""
