"""What was chosen where, and why everything else was not."""
