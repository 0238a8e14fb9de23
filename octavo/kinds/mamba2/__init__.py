"""Mamba-2: a state space with one decay per head."""
