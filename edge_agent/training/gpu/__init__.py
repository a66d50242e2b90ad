"""Training on a GPU: weights that stay in its memory, and steps that it repeats as CUDA graphs."""
