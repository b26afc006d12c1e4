"""The standard layers, each a ``PluggableLayer`` that binds its ops when it is constructed."""
