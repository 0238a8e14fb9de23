"""From a step plan to sampled tokens: the arena's tensors, batches, weights, the model, the
sampler.
"""
