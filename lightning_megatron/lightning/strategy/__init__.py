"""The strategy: hooks.py is the story of a run, megatron.py what users give and call, the others hold a state each."""
