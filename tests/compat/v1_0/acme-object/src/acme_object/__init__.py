"""A plugin that is an object."""
