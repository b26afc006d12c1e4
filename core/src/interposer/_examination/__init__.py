"""The examination of plugin code, in a process of its own, before this process runs it."""
