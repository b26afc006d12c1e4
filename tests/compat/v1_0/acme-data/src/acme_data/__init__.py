"""A described device and a table of measurements."""
