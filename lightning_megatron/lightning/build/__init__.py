"""The layout a module's model was built for, and changes made to the module before it was built."""
