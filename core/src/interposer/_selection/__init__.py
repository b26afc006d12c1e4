"""One way to choose: candidates are judged, ranked, and bound."""
