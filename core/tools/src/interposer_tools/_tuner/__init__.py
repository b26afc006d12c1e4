"""The tuner: times kernels and attention backends so that the fastest is selected."""
