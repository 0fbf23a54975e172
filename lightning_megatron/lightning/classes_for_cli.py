"""Classes that ``LightningCLI`` finds by their names, among the subclasses that are imported."""

from lightning_megatron.lightning import callbacks
from lightning_megatron.lightning.datamodules import bert_data, chat_data, datamodule, t5_data
from lightning_megatron.lightning.modules import bert, decoder, t5

__all__ = ["bert", "bert_data", "chat_data", "datamodule", "decoder", "t5", "t5_data"]

for _name in callbacks.__all__:
    getattr(callbacks, _name)
