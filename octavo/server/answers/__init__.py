"""What a model writes beside plain text: thoughts and calls of tools, in each family's own form."""
