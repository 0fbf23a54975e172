"""What a machine brings along besides its devices, and whether that fits together."""
