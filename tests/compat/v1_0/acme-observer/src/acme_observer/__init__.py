"""An observer of some hooks, with some of their arguments."""
