"""The doctor: what is installed, what works, what failed and how to mend it."""
