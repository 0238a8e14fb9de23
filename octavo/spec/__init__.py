"""What a model's layers remember, and for how long. Torch-free."""
