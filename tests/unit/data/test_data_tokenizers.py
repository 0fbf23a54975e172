import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lightning_megatron.data import DataError, IndexedDataset, Tokenizer, build_tokenizer
from lightning_megatron.data.preprocessing.encode import TokenizerSpec
from lightning_megatron.data.preprocessing.preprocess import preprocess
from lightning_megatron.data.preprocessing.train_tokenizer import train_tokenizer
from lightning_megatron.data.tokenizers import TOKENIZER_TYPES
from lightning_megatron.errors import ConfigError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "seven",
    "zebras",
    "quietly",
    "watch",
]
TEXTS = [" ".join(WORDS[i % 13 :] + WORDS[: i % 13]) + f", number {i}." for i in range(200)]
HARD = "Tabs\tand  two spaces, naïve café, 日本語, 🙂, 3.14"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model, GPT-2 and BERT vocabularies and a Hugging Face tokenizer, all trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    train_tokenizer([folder / "corpus.jsonl"], folder / "tokenizer.model", vocab_size=400, pad_id=3)

    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    (folder / "gpt2").mkdir()
    bpe.save_model(str(folder / "gpt2"))

    bert = tokenizers.BertWordPieceTokenizer(lowercase=True)
    bert.train_from_iterator([*TEXTS, "Hello CAFE"], vocab_size=300, min_frequency=1, show_progress=False)
    bert.save_model(str(folder))

    (folder / "hf").mkdir()
    bpe.add_special_tokens(["<|begin|>", "<|pad|>"])
    backend = bpe._tokenizer
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
    )
    backend.save(str(folder / "hf" / "tokenizer.json"))
    special = {"bos_token": "<|begin|>", "eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|pad|>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def arguments(type: str, folder: Path) -> dict[str, Any]:
    return {
        "GPTSentencePieceTokenizer": {"path": folder / "tokenizer.model"},
        "Llama2Tokenizer": {"path": folder / "tokenizer.model"},
        "HuggingFaceTokenizer": {"path": folder / "hf"},
        "GPT2BPETokenizer": {"path": folder / "gpt2"},
        "BertWordPieceLowerCase": {"vocab_file": folder / "vocab.txt"},
        "BertWordPieceCase": {"path": folder},
        "NullTokenizer": {"vocab_size": 100},
    }[type]


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_every_type_is_a_tokenizer(type: str, folder: Path) -> None:
    tokenizer = build_tokenizer(type, **arguments(type, folder))
    assert isinstance(tokenizer, Tokenizer)
    text = "1 2 99" if type == "NullTokenizer" else TEXTS[0]
    ids = tokenizer.encode(text)
    assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
    decoded = tokenizer.decode(ids)
    assert (decoded.replace(" ", "") if "Bert" in type else decoded) == (
        text.replace(" ", "") if "Bert" in type else text
    )
    assert tokenizer.eod is not None
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


@pytest.mark.parametrize("type", ["GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"])
def test_any_text_survives(type: str, folder: Path) -> None:
    tokenizer = build_tokenizer(type, **arguments(type, folder))
    assert tokenizer.decode(tokenizer.encode(HARD)) == HARD


def test_sentencepiece_and_llama_differ_in_the_begin_token(folder: Path) -> None:
    gpt = build_tokenizer("GPTSentencePieceTokenizer", folder / "tokenizer.model")
    llama = build_tokenizer("Llama2Tokenizer", folder / "tokenizer.model")
    assert (gpt.vocab_size, gpt.bos, gpt.eos, gpt.eod, gpt.pad) == (400, 1, 2, 2, 3)
    assert llama.encode("the fox") == [1, *gpt.encode("the fox")]
    assert llama.decode(llama.encode("the fox")) == "the fox"


def test_special_tokens_of_the_others(folder: Path) -> None:
    gpt2 = build_tokenizer("GPT2BPETokenizer", folder / "gpt2")
    assert gpt2.eod == gpt2.eos == json.loads((folder / "gpt2" / "vocab.json").read_text())["<|endoftext|>"]
    assert gpt2.eod not in gpt2.encode("text that says <|endoftext|>"), "text cannot end a document"
    hf = build_tokenizer("HuggingFaceTokenizer", folder / "hf" / "tokenizer.json")
    assert hf.encode("the fox")[0] == hf.bos == gpt2.vocab_size
    assert hf.eod == hf.eos == gpt2.eod
    assert hf.pad == hf.vocab_size - 1
    bert = build_tokenizer("BertWordPieceLowerCase", vocab_file=folder / "vocab.txt")
    pieces = (folder / "vocab.txt").read_text().splitlines()
    assert (bert.bos, bert.eos, bert.pad) == tuple(pieces.index(p) for p in ("[CLS]", "[SEP]", "[PAD]"))
    assert bert.encode("THE Fox") == bert.encode("the fox")
    cased = build_tokenizer("BertWordPieceCase", vocab_file=folder / "vocab.txt")
    assert cased.encode("THE Fox") != cased.encode("the fox")
    null = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (null.vocab_size, null.eod, null.pad) == (101, 100, None)


def test_agrees_with_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "hf" / "tokenizer.json"))
    assert build_tokenizer("HuggingFaceTokenizer", folder / "hf").encode(HARD) == theirs(HARD).input_ids


def test_unknown_type_lists_the_types() -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer("SentencePieceTokenizer", "x")
    assert all(type in str(caught.value) for type in TOKENIZER_TYPES)
    assert "nearest valid: GPTSentencePieceTokenizer" in str(caught.value)


@pytest.mark.parametrize("type", [t for t in TOKENIZER_TYPES if t != "NullTokenizer"])
def test_missing_file_is_named(type: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*: no such file; "):
        build_tokenizer(type, tmp_path / "nowhere")


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_missing_argument_is_named(type: str) -> None:
    with pytest.raises(ConfigError, match=rf"(tokenizer_model|vocab_file|vocab_size)=None: {type} needs "):
        build_tokenizer(type)


def test_faulty_files(tmp_path: Path, folder: Path) -> None:
    junk = tmp_path / "junk.json"
    junk.write_text("junk")
    with pytest.raises(DataError, match=r"junk\.json: not a sentencepiece model"):
        build_tokenizer("Llama2Tokenizer", junk)
    with pytest.raises(DataError, match=r"junk\.json: not a tokenizer file"):
        build_tokenizer("HuggingFaceTokenizer", junk)
    with pytest.raises(DataError, match=r"hub/name/tokenizer\.json|hub/name: no such file; only local files are read"):
        build_tokenizer("HuggingFaceTokenizer", "hub/name")
    with pytest.raises(DataError, match=r"junk\.json: not a BPE vocabulary, or .*merges\.txt does not belong to it"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=junk, merge_file=folder / "gpt2" / "merges.txt")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=r"vocab\.json: has no <\|endoftext\|>"):
        build_tokenizer("GPT2BPETokenizer", tmp_path)
    with pytest.raises(DataError, match=r"junk\.json: has no \[UNK\], \[CLS\], \[SEP\], \[PAD\]"):
        build_tokenizer("BertWordPieceCase", junk)
    with pytest.raises(DataError, match="token id 100 is not in a vocabulary of 100"):
        build_tokenizer("NullTokenizer", vocab_size=100).encode("3 100")
    with pytest.raises(DataError, match="reads token ids separated by spaces"):
        build_tokenizer("NullTokenizer", vocab_size=100).encode("three")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[data\]' in a clone"):
        build_tokenizer("HuggingFaceTokenizer", folder / "hf")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ModuleNotFoundError, match="pip install sentencepiece"):
        build_tokenizer("Llama2Tokenizer", folder / "tokenizer.model")


def test_training_is_deterministic_and_sets_the_ids(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_tokenizer([folder / "corpus.jsonl"], tmp_path / f"{name}.model", vocab_size=400, pad_id=3)
    assert (tmp_path / "one.model").read_bytes() == (tmp_path / "two.model").read_bytes()
    assert (tmp_path / "one.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    (tmp_path / "plain.txt").write_text("\n".join(TEXTS))
    path = train_tokenizer(
        [tmp_path / "plain.txt"], tmp_path / "u.model", vocab_size=50, model_type="unigram", byte_fallback=False,
        unk_id=1, bos_id=-1, eos_id=0,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (1, -1, 0, -1)


def test_training_faults(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.txt: no text to train a tokenizer on; the corpus is empty"):
        train_tokenizer([tmp_path / "empty.txt"], tmp_path / "m.model", vocab_size=300)
    (tmp_path / "small.txt").write_text("a b c\n" * 9)
    with pytest.raises(ConfigError, match=r"vocab_size=5000: the text has too few different.*nearest valid: \d+"):
        train_tokenizer([tmp_path / "small.txt"], tmp_path / "m.model", vocab_size=5000)
    with pytest.raises(ConfigError, match="model_type='wordpiece': unknown kind of model; nearest valid: bpe, unigram"):
        train_tokenizer([tmp_path / "small.txt"], tmp_path / "m.model", vocab_size=300, model_type="wordpiece")  # type: ignore[arg-type]
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"latin\.txt, line 2: not UTF-8"):
        train_tokenizer([tmp_path / "latin.txt"], tmp_path / "m.model", vocab_size=300)
    assert not list(tmp_path.glob("m.model*"))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("piece", list("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))
def test_only_a_newline_ends_a_piece(piece: str, end: str, tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_bytes("".join(name + end for name in ["[PAD]", "[UNK]", "[CLS]", "[SEP]", piece, "river"]).encode())
    tokenizer = build_tokenizer("BertWordPieceCase", file)
    assert (tokenizer.encode("river"), tokenizer.vocab_size) == ([5], 6)


def test_size_of_a_vocabulary_with_unused_ids_is_its_largest_id_and_one(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2, "ab": 7}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    tokenizer = build_tokenizer("GPT2BPETokenizer", **files)
    assert (tokenizer.encode("ab"), tokenizer.vocab_size) == ([7], 8)


def test_pieces_of_word_pieces_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "river ", "stone\t", "\u2028", "[MASK]", "cloud"]
    (tmp_path / "vocab.txt").write_bytes("\n".join(names).encode())  # the last line has no end
    ours, theirs = build_tokenizer("BertWordPieceCase", tmp_path), transformers.BertTokenizer.from_pretrained(tmp_path)
    assert (ours.encode("river stone cloud"), ours.vocab_size) == ([4, 5, 8], 9)
    assert theirs("river stone cloud", add_special_tokens=False).input_ids == [4, 5, 8]


@pytest.mark.parametrize("highest", [70, 70_000])
def test_ids_around_a_text_count_for_the_size(highest: int, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "red": 1}, unk_token="[UNK]"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", highest)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text('{"text": "red"}\n')
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path)
    assert (tokenizer.encode("red"), tokenizer.vocab_size) == ([highest, 1], highest + 1)
    spec = TokenizerSpec("HuggingFaceTokenizer", str(tmp_path))
    preprocess([tmp_path / "text.jsonl"], tmp_path / "out", spec)
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [highest, 1]


@pytest.mark.parametrize("character", list("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r"))
def test_training_learns_every_character_but_the_newline(character: str, tmp_path: Path) -> None:
    file = tmp_path / "plain.txt"
    file.write_bytes("".join(text.replace(",", character) + "\n" for text in TEXTS).encode())
    options = {"byte_fallback": True, "character_coverage": 0.9995, "normalization_rule_name": "identity"}
    options |= {"remove_extra_whitespaces": False, "split_digits": True, "allow_whitespace_only_pieces": True}
    sentencepiece.SentencePieceTrainer.train(
        input=str(file),
        model_prefix=str(tmp_path / "theirs"),
        vocab_size=320,
        model_type="bpe",
        minloglevel=2,
        **options,
    )
    ours = train_tokenizer([file], tmp_path / "ours.model", vocab_size=320)
    found = [
        [model.id_to_piece(number) for number in range(320)]
        for path in (ours, tmp_path / "theirs.model")
        for model in [sentencepiece.SentencePieceProcessor(model_file=str(path))]
    ]
    assert found[0] == found[1]
    assert any(character in piece for piece in found[0])


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.ndjson", "corpus.txt"])
def test_training_learns_the_text_of_json_lines_whatever_their_name(name: str, tmp_path: Path) -> None:
    """The same model as from the texts alone."""
    texts = [" ".join(("alpha", "beta", "gamma", "delta")[(n * k) % 4] for k in range(1, 9)) for n in range(50)]
    (tmp_path / name).write_text("".join(json.dumps({"identifier": n, "text": t}) + "\n" for n, t in enumerate(texts)))
    (tmp_path / "plain.txt").write_text("".join(f"{text}\n" for text in texts))
    made = [
        train_tokenizer([tmp_path / file], tmp_path / f"{file}.model", vocab_size=290) for file in (name, "plain.txt")
    ]
    assert made[0].read_bytes() == made[1].read_bytes()
