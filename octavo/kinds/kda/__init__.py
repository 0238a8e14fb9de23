"""Kimi delta attention: the delta rule with a decay per channel."""
