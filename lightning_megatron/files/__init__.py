"""Files: read whole or mapped, written under a name of their own, with errors that name them."""
