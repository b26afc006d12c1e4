"""The report of ``interposer doctor``: installed plugins, failures and fixes."""
