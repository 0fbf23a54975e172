"""Classes that ``LightningCLI`` finds by their names, among the subclasses that are imported."""

from lightning_megatron.lightning import callbacks, datamodule, module
from lightning_megatron.lightning.modules import bert, bert_data, chat_data, t5, t5_data

__all__ = ["bert", "bert_data", "chat_data", "datamodule", "module", "t5", "t5_data"]

for _name in callbacks.__all__:
    getattr(callbacks, _name)
