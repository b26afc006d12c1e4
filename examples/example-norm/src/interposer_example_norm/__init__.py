"""An example plugin: norm kernels and a layer, written as a third party would write them."""
