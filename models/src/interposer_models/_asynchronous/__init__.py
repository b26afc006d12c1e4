"""Asynchronous interface: requests of any event loop, run by one step thread."""
