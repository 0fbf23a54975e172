"""Trained decoders evaluated on all ranks of any layout: perplexity, cloze tests, and the tasks of lm-eval."""
