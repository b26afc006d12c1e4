"""The policy of the user, and storage shared by processes."""
