"""Discovery of installed plugins, trust in them, and the registry of their candidates."""
