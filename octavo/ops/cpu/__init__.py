"""Ops by the compiled kernels of ``octavo/kernels``, for CPUs: float32 and bfloat16.

The only place that knows what kernels take. What they do not take goes to plain PyTorch.
"""
