"""Discovery of the installed plugins, and the registry of the candidates."""
