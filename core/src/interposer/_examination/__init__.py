"""The examination of plugin code in another process, before this process runs the code."""
