"""Memory, graphs and threads of devices: the parts that platforms share."""
