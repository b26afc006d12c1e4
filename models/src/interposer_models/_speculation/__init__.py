"""Speculative decoding: draft tokens that the target model verifies, several in one step."""
