"""The examination of plugin code, in a process of its own, before this process runs it.

It protects against plugins that are broken, careless or built for another machine. It is no
sandbox: code that means harm can do it from the child as well.
"""
