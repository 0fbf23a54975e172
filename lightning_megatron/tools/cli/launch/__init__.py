"""``lightning-megatron launch``: one recipe for every launcher."""
