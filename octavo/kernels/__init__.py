"""Compiled CPU kernels: C++ without torch, called through ctypes on plain pointers.

A kernel is a file in ``csrc/`` (compiled once per instruction set), a Python file of the same name
with its typed wrapper, and its slow oracle in ``reference.py``. Where the library is missing or
switched off, callers use torch.
"""
