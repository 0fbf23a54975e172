"""Parts of which the files of ``lightning_megatron/families`` are made."""
