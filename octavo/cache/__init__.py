"""How remembered things are found again: tables, prefix index, checkpoints, eviction.
Torch-free.
"""
