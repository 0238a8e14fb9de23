"""Tensor operations on paged caches: the seam a compiled kernel replaces. Knows no kinds, no plans
and no requests.
"""
