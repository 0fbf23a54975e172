"""Detection of data files that were truncated during a run."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from lightning_megatron.data.chat.encoded import EncodedChats
from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.errors import DataError
from lightning_megatron.files.mapped import MappedFiles


def name_cut_files(exception: BaseException, data: Any) -> None:
    """Prefix the message of an exception with the name of a file that was truncated during the run.

    A worker that reads past the end of a mapped file dies of SIGBUS without a message. torch then reports a killed
    worker, and suggests too little shared memory.

    Args:
        exception: exception that ended the run; nothing is done unless it is a ``RuntimeError``, as torch raises.
        data: data set, or sequence of some; anything else has no files.
    """
    if not isinstance(exception, RuntimeError):
        return
    try:
        check_files(data)
    except DataError as error:
        exception.args = (f"{error}\n{exception}",)


def check_files(data: Any) -> None:
    """Check the lengths of all files that data sets, and the data sets inside them, have mapped.

    Args:
        data: data set, or sequence of some; anything else has no files.

    Raises:
        DataError: if a file is shorter than it was.
    """
    if isinstance(data, MappedFiles):
        data.check()
    elif isinstance(data, list | tuple):
        for part in data:
            check_files(part)
    elif isinstance(data, Dataset | IndexedDataset | EncodedChats):
        for part in vars(data).values():
            check_files(part)
