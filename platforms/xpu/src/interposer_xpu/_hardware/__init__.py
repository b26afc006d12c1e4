"""What the machine has, without initialising a device."""
