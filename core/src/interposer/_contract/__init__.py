"""Types of the plugin API: platforms, ops, layers, backends, schemes, requests, answers."""
