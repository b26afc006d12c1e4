"""The report of a verification, as data, text, pages and JUnit XML."""
