"""What a verification found, as data, text, pages and JUnit XML."""
