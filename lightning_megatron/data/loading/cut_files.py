"""The file whose end has killed a DataLoader's worker."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from lightning_megatron.data.chat.encoded import EncodedChats
from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.errors import DataError
from lightning_megatron.files.mapped import MappedFiles


def name_cut_files(exception: BaseException, data: Any) -> None:
    """Put the name of a file that was cut off under a run in front of the message of an exception.

    A worker that reads behind the end of a mapped file dies of SIGBUS before it can say so. torch then tells of a
    worker that was killed, and guesses at too little shared memory.

    Args:
        exception: what has ended the run; torch raises a ``RuntimeError``, wherever the process is.
        data: data set, or sequence of some; anything else has no files.
    """
    if not isinstance(exception, RuntimeError):
        return
    try:
        check_files(data)
    except DataError as error:
        exception.args = (f"{error}\n{exception}",)


def check_files(data: Any) -> None:
    """Check the lengths of files that data sets, and all that they are made of, have mapped.

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
