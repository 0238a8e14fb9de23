"""DeepSeek sparse attention: latent attention over the tokens that an indexer picks."""
