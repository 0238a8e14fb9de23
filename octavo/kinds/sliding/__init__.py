"""Sliding-window attention: every token sees the last ``window`` tokens, itself included."""
