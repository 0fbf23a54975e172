"""Context parallelism: padding and shards of sequences, and attention over a sequence sharded across ranks."""
