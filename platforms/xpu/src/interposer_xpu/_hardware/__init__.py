"""Hardware of the machine, inspected without initialising a device."""
