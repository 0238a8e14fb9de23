"""Lightning attention: linear attention with a fixed decay per head."""
