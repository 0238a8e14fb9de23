"""Torch modules that models share. Knows layers by their kind's contract only."""
