"""Files: read whole or mapped, written under temporary names, with errors that name them."""
