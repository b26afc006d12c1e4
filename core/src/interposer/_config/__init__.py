"""The configuration of the user, and storage shared by processes."""
