"""Experts in MXFP4, as gpt-oss stores them."""
