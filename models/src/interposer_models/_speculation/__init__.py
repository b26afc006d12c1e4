"""Speculative decoding: tokens are guessed, and several verified in one step."""
