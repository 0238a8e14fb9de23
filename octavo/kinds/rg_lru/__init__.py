"""RG-LRU: a gated linear recurrence with one number per channel."""
