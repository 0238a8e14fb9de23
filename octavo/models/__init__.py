"""Model families, files of data. Torch-free; ``octavo.spec.hf.find_families`` finds what is called ``FAMILY`` or ``FAMILIES``."""
