"""Files to evaluate on: what is predicted of them, and the texts of what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron.errors import DataError
from lightning_megatron.tools.evaluation.corpora import Encoding, Reader
from lightning_megatron.tools.evaluation.wikitext import without_spacing


class Letters:
    """A token a letter; as Llama's, with a token before each text, or as BERT's, with one behind it too.

    Args:
        before: token before each text.
        after: token behind each text.
    """

    vocab_size, eos, pad = 200, None, None

    def __init__(self, before: int | None = None, after: int | None = None, eod: int | None = 2) -> None:
        self.bos, self._after, self.eod = before, after, eod

    def encode(self, text: str) -> list[int]:
        around = [[x] if x is not None else [] for x in (self.bos, self._after)]
        return [*around[0], *map(ord, text), *around[1]]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_documents(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": "ab cd e"}, {"text": ""}, {"text": "ä"})
    found = list(Reader().read(path, Letters(), 256))
    assert [text.tokens for text in found] == [[*map(ord, "ab cd e")], [], [228]]
    assert [(text.words, text.num_bytes, text.asked) for text in found] == [(2, 7, None), (0, 0, None), (0, 2, None)]
    found = list(Reader(begins=True).read(path, Letters(), 256))
    assert [text.tokens[0] for text in found] == [2, 2, 2], (
        "the token that ends documents begins them, if there is no other"
    )
    assert [text.words for text in found] == [3, 0, 1]
    found = list(Reader(begins=True).read(path, Letters(before=1), 256))
    assert found[0].tokens == [1, *map(ord, "ab cd e")], "not twice"


def test_special_tokens_of_a_tokenizer():
    both = Encoding(Letters(before=1, after=3))
    assert both.whole("ab") == [1, 97, 98]
    assert both.inside("ab") == [97, 98]
    assert both.begin == 1
    assert Encoding(Letters(eod=None)).begin is None
    with pytest.raises(DataError, match="no token to begin a text with: leave --begin out"):
        Encoding(Letters(eod=None)).begun([5])


def test_wikitext_is_tokenized_without_its_spacing_and_counted_with_it(tmp_path):
    path = tmp_path / "wiki.tokens"
    path.write_text(" \n = A B = \n \n c 's d @-@ e , ( f ) . \n")
    (text,) = Reader("wikitext").read(path, Letters(), 256)
    assert "".join(map(chr, text.tokens)) == "\n= A B =\n\nc's d-e, (f).\n"
    assert text.words == 16 - 1, "what blanks part"
    (text,) = Reader("text").read(path, Letters(), 256)
    assert "".join(map(chr, text.tokens)) == path.read_text()


@pytest.mark.parametrize(
    ("spaced", "plain"),
    [
        ("the cats ' tails", "the cats' tails"),
        ("1 @,@ 000 @.@ 5 m", "1,000.5 m"),
        ("so : a ; b ! c ? d", "so: a; b! c? d"),
        ("( a b ) [ c ] { d }", "(a b) [c] {d}"),
        ('he said " no way " twice', 'he said "no way" twice'),
        ("= = = Title = = =", "=== Title ==="),
        ("= = = = Title", "==== Title"),
        ("20 ° C", "20°C"),
        ("about N of it 's true", "about 1 of it's true"),
        ("end \n begin", "end\nbegin"),
    ],
)
def test_each_kind_of_spacing(spaced, plain):
    assert without_spacing(spaced) == plain


def test_lambada(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": "a cat ran to cats"})
    (text,) = Reader("lambada").read(path, Letters(before=1), 256)
    assert (text.tokens, text.asked) == ([1, *map(ord, "a cat ran to cats")], 1)
    (text,) = Reader("lambada", strict=True).read(path, Letters(before=1), 256)
    assert (text.tokens, text.asked) == ([1, *map(ord, "a cat ran to cats")], 5), "the blank is of the word"


def test_faults_name_file_and_line(tmp_path):
    good = {"text": "a b"}
    for record, format, fault in (
        ("{", "documents", "line 2: not JSON"),
        ([1], "documents", "line 2: a JSON list, not an object"),
        (
            {"body": "x"},
            "documents",
            "line 2: has no key 'text', only 'body'; name the key of the text with --json-keys",
        ),
        ({"text": 5}, "documents", "line 2: the value of 'text' is int, not text"),
        ({"text": "one"}, "lambada", "line 2: a passage of less than two words"),
    ):
        path = lines(tmp_path / "a.jsonl", good)
        path.write_text(path.read_text() + (record if isinstance(record, str) else json.dumps(record)) + "\n")
        with pytest.raises(DataError) as raised:
            Reader(format).check(path)
        assert fault in str(raised.value)
        assert str(path) in str(raised.value)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="there is no text in it"):
        Reader().check(path)
    path.write_bytes(b"a\xff")
    with pytest.raises(DataError, match=r"not UTF-8 .*give a plain text, or --format documents"):
        Reader("text").check(path)
    path = lines(tmp_path / "b.jsonl", good, {"text": "z"})
    with pytest.raises(DataError, match=r"line 2: the tokenizer makes token 122 of it, and the model knows 100"):
        list(Reader().read(path, Letters(), 100))
    Reader(key="body").check(lines(tmp_path / "c.jsonl", {"body": "x"}))
    with pytest.raises(DataError, match="longer than 4 bytes"):
        Reader(longest_line=4).check(path)
