"""``lightning-megatron plan``: the layout that fits, before a device is rented."""
