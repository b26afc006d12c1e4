"""Attention to latent vectors by the package flash_mla."""
