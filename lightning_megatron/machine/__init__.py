"""Software and limits of a machine, and checks that they fit together."""
