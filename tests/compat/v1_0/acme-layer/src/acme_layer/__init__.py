"""A norm layer instead of the standard one."""
