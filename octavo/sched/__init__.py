"""Which tokens run next. Torch-free, clock-free, without I/O."""
