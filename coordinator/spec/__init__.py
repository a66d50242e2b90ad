"""From a torch module to the `ModelSpec` that travels: its layers, its neurons, and which are coupled."""
