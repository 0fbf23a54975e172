"""Where Lightning's Trainer meets the rest of the house; nothing below imports Lightning."""
