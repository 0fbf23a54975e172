"""Building blocks of the files in ``lightning_megatron/families``."""
