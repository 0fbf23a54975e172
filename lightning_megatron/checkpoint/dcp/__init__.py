"""A checkpoint's files, written and read with torch.distributed.checkpoint."""
