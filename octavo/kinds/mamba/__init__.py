"""Mamba: a selective state space with a state per channel."""
