"""Seeded simulation of scheduler and cache with a fake runner that checks every byte's owner.
Torch-free.
"""
