"""Training on a card with a memory of its own: weights that stay there, steps that it repeats by itself."""
