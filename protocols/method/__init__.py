"""What a method is, and what families of methods share: averaging, sub-models, personal targets."""
