"""T5: an encoder, and a decoder that looks at it."""
