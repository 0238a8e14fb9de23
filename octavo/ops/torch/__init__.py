"""Every op in plain PyTorch, for any device and dtype: what all other backends fall back on."""
