"""What a device sends of a model: which entries are selected, their values as a patch, and their bytes."""
