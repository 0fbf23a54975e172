"""Classes that ``LightningCLI`` finds by their names, among the subclasses that are imported."""

import lightning_megatron

for _name in lightning_megatron.__all__:
    getattr(lightning_megatron, _name)
