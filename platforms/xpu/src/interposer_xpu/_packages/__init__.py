"""The optional kernel package, and checks that the installed versions can be used."""
