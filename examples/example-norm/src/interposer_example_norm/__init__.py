"""Example plugin: RMS norm kernels and a norm layer, written as a third party would write them."""
