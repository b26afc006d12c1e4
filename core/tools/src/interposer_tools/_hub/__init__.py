"""Export of Triton kernels as a repository for Hugging Face's kernel hub."""
