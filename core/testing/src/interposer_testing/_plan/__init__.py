"""The plan: checks of records for described devices, without running a kernel."""
