"""Updates of a model: selections of entries, patches with their values, and the bytes that carry them."""
