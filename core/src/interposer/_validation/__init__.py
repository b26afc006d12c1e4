"""What an installed distribution is and declares, checked without running its code."""
