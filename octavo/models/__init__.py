"""Model families, files of data. Torch-free; ``octavo.spec.hf.find_families`` looks for ``FAMILY``
and ``FAMILIES``.
"""
