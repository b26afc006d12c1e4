"""The judge: untrusted kernels run in another process, and this one decides on the verdict."""
