"""The prefix index: which pages hold which prefix, and which of them go first. Torch-free."""
