"""Contents that do harm where they are believed: pickles that run things, archives and JSON that grow."""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30


def text_of(value: str) -> bytes:
    """A string, in a pickle."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def running(mark: Path) -> dict[str, bytes]:
    """Pickles that touch ``mark`` where what they name is called or imported; each leaves a value on the stack."""
    touch, path = text_of(f"touch {mark}"), text_of(str(mark))
    evil = text_of(f"open({str(mark)!r}, 'w')")
    imported = b"cevil_import\nThing\n"
    dotted = b"\x80\x04" + b"\x8c\x05torch" + b"\x8c\x10serialization.os" + b"\x93"
    return {
        "reduce": b"cos\nsystem\n(" + touch + b"tR",
        "posix": b"cposix\nsystem\n(" + touch + b"tR",
        "stack-global": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93" + evil + b"\x85R",
        "exec": b"cbuiltins\nexec\n(" + evil + b"tR",
        "obj": b"(cos\nsystem\n" + touch + b"o",
        "inst": b"(" + touch + b"ios\nsystem\n",
        "newobj": b"\x80\x02csubprocess\nPopen\n(" + touch + b"Nt\x81",
        "newobj-ex": b"\x80\x04csubprocess\nPopen\n(" + touch + b"t}" + text_of("shell") + b"\x88s\x92",
        "import": imported,
        "import-and-build": imported + b")\x81}" + text_of("x") + b"K\x01sb",
        "build-class": b"cargparse\nNamespace\n(N}Vevil\nI1\nstb",
        "build-slots": b"ccollections\nOrderedDict\n(N}V__init__\nI1\nstb",
        "open": b"cio\nopen\n(" + path + b"Vw\ntR",
        "path": b"cpathlib\nPosixPath\n(" + path + b"tR0" + b"cpathlib\nPath.touch\n(" + path + b"tR",
        "dotted": dotted,
        "getattr": b"cbuiltins\ngetattr\n(cos\npath\nVos\ntR",
        "load-bytes": b"ctorch.storage\n_load_from_bytes\n(C\x10cos\nsystem\n(V:\ntR.tR",
        "numpy": b"cnumpy\nfromfile\n(" + path + b"tR",
        "extension": b"\x80\x02\x82\x01",
        "persistent": b"(Vstorage\ncos\nsystem\nV0\nVcpu\nI9\ntQ",
        "codecs": b"c_codecs\nencode\n(" + path + b"Vhex\ntR",
        "torch-load": b"ctorch\nload\n(" + path + b"tR",
        "torch-save": b"ctorch\nsave\n(I1\n" + path + b"tR",
        "model-zoo": b"ctorch.hub\nload\n(" + path + b"Vx\ntR",
    }


def growing() -> dict[str, bytes]:
    """Pickles without code that are to exhaust memory, time or the stack; whole files."""
    laughs = b"]q\x00K\x01a" + b"".join(
        b"]q" + bytes([i + 1]) + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(40)
    )
    return {
        "empty": b"",
        "truncated": b"\x80\x02}q\x00(X\x05\x00",
        "zeros": bytes(4096),
        "text": b"this is no pickle at all\n" * 10,
        "deep-lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "deep-tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "laughs": b"\x80\x02" + laughs + b".",
        "huge-string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        "huge-bytes": b"\x80\x04\x8e" + struct.pack("<Q", 40 * GIB) + b"x.",
        "huge-long": b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFF0) + b"\x01.",
        "huge-memo": b"\x80\x02}r\xff\xff\xff\x7f.",
        "huge-frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        "protocol": b"\x80\x63N.",
        "digits": b"I" + b"9" * 100_000 + b"\n.",
        "number": b"\x80\x02K\x07.",
        "none": b"N.",
        "list": b"\x80\x02]q\x00(K\x01K\x02e.",
        "itself": b"\x80\x04}\x94X\x01\x00\x00\x00ah\x00s.",
    }


def zipped(pickled: bytes, *, compressed: bool = False, **more: bytes) -> bytes:
    """An archive as ``torch.save`` writes it, with this pickle."""
    buffer = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", how) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for name, content in more.items():
            archive.writestr(f"archive/{name}", content)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


@functools.cache
def zip_bomb(size: int = 3 * GIB // 2) -> bytes:
    """An archive of ``torch.save`` whose pickle is a long string, compressed a thousandfold."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as stream:
            stream.write(b"\x80\x04\x8d" + struct.pack("<Q", size))
            block = bytes(1 << 22)
            for _ in range(size >> 22):
                stream.write(block)
            stream.write(b".")
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def torchscript(mark: Path) -> bytes:
    """A module that writes ``mark`` when it is loaded by ``torch.jit``."""

    class Evil(torch.nn.Module):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where
            self.x = torch.ones(1)

        @torch.jit.export
        def __getstate__(self):
            return self.x, self.where, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[torch.Tensor, str, bool]):
            self.x, self.where, self.training = state
            torch.save(self.x, self.where)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Evil(str(mark))), buffer)
    return buffer.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    """Bytes that ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


class _Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def odd_tensors() -> dict[str, Any]:
    """Tensors that are not what they seem; none has the right shape, which their reader must check."""
    rebuild, sparse = torch._utils._rebuild_tensor_v2, torch._utils._rebuild_sparse_tensor
    storage = torch.ones(4).storage()
    indices = torch.tensor([[10**12]])
    return {
        "sizes-outside": _Calls(rebuild, storage, 0, (1 << 40,), (1,), False, {}),
        "offset-outside": _Calls(rebuild, storage, 1 << 50, (2,), (1,), False, {}),
        "stride-outside": _Calls(rebuild, storage, 0, (2, 2), (1 << 50, 1), False, {}),
        "negative": _Calls(rebuild, storage, -8, (2,), (1,), False, {}),
        "overflow": _Calls(rebuild, storage, 0, (1 << 62, 8), (1, 1), False, {}),
        "sparse": _Calls(sparse, torch.sparse_coo, (indices, torch.ones(1), (4,), False)),
        "meta": torch.empty(1 << 40, device="meta"),
        "expanded": torch.ones(1).expand(1 << 33),
        "complex": torch.ones(4, dtype=torch.complex64),
        "string": "no tensor",
        "none": None,
    }


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)


def json_bombs() -> Mapping[str, bytes]:
    """JSON that is none, or is too deep, too long, or of another type."""
    return {
        "empty": b"",
        "deep-list": b"[" * 200_000 + b"]" * 200_000,
        "deep-dict": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "digits": b'{"a": ' + b"9" * 10_000 + b"}",
        "list": b"[1, 2]",
        "number": b"7",
        "string": b'"x"',
        "null": b"null",
        "not-utf8": b'{"a": "\xff\xfe"}',
        "utf16": '{"a": 1}'.encode("utf-16"),
        "nul": b"\0" * 4096,
        "cut": b'{"weight_map": {"a": "b',
    }
