"""The plan: a check of records on described devices that runs no kernel."""
