"""Short convolution: a gated causal convolution over a few tokens, and no other memory."""
