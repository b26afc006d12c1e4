"""Hardware of the machine, found without initialising a device."""
