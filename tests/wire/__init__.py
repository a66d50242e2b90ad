"""The wire as any language reads it: byte vectors, and a decoder that shares no code with the product."""
