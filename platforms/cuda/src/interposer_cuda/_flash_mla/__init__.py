"""Latent attention (MLA) through the package flash_mla."""
