"""Optional kernel packages, and checks that the installed versions can be used."""
