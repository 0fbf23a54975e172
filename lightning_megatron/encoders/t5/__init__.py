"""T5: an encoder, and a decoder that attends to its output."""
