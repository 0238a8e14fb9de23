"""Where remembered things are put: slabs, pages, buckets. Knows bytes only. Torch-free."""
