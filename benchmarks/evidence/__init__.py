"""Evidence from an accelerator: a bundle to carry there, stages to run, and results to bring back.

Nothing here needs more than the standard library, but for building the bundle.
"""
