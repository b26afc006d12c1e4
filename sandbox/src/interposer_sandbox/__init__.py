"""Functions of foreign code, run in a guarded fork of this process that can be lost."""
