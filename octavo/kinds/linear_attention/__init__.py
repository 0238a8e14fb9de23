"""Linear attention with a feature map."""
