"""Model families, one file of data each. Torch-free; ``octavo.spec.hf.find_families`` finds every module with a ``FAMILY``."""
