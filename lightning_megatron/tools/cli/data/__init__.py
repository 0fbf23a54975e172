"""Commands about text, tokenizers and token files."""
