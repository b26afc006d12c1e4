"""What can be said of records without running them, on described devices."""
