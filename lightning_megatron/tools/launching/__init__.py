"""Jobs as text: batch scripts, manifests and commands for a recipe and a small description of the cluster."""
