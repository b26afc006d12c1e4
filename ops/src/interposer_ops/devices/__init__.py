"""Memory, graphs and threads of devices: code shared by platforms."""
