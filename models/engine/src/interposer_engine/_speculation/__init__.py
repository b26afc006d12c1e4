"""Speculative decoding: draft tokens, and their verification by the target model."""
