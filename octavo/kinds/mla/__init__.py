"""Multi-head latent attention: every token keeps one latent that all heads share."""
