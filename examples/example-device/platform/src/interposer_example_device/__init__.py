"""The example device as a platform."""
