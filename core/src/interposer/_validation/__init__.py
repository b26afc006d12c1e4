"""Facts and declarations of distributions, checked without running their code."""
