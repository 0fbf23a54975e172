"""Commands that use a trained model: text generation and evaluation."""
