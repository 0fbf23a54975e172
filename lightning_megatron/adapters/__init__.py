"""LoRA and DoRA: small matrices that are trained beside the frozen weights of a model."""
