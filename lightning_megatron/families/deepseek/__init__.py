"""DeepSeek, in versions."""
