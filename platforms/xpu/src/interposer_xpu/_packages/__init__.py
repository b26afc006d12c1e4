"""The optional package vllm-xpu-kernels, and checks that the installed version can be used."""
