"""The benchmark of a loaded model: rows of requests, the roofline, and the report."""
