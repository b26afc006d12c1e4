"""The report of ``interposer doctor``: installed plugins, failures and how to fix them."""
