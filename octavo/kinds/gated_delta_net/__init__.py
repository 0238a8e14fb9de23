"""Gated delta net: a matrix per head, corrected by the delta rule and decayed by a gate."""
