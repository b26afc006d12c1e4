"""Speculative decoding: drafting of tokens, and their verification by the target model."""
