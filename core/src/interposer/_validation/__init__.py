"""Facts and declarations of installed distributions, checked without running its code."""
