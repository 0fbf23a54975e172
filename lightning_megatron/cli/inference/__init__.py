"""Commands that use a trained model: to continue a text, and to find out how good it is."""
