"""Cases of `masked.npz`: length, documents, seed and options of megatron-core's configuration."""

from typing import Any

SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "bos": 4, "eos": 5}
SENTINELS = list(range(6, 26))
FIRST = 26
"""First token of a text; one in three of the others continues a word."""
PIECES = [f"[{number}]" for number in range(FIRST)] + ["##x" if n % 3 == 0 else "x" for n in range(FIRST, 400)]
SAMPLES = 150

Case = tuple[int, tuple[int, int], int, dict[str, Any]]
NEXT = {"classification_head": True}
BERT: dict[str, Case] = {
    "plain": (48, (0, 60), 1234, NEXT),
    "some_documents": (32, (11, 50), 7, NEXT),
    "short": (64, (0, 60), 3, NEXT | {"short_sequence_probability": 0.4}),
    "tokens": (40, (0, 60), 99, NEXT | {"masking_do_full_word": False, "masking_probability": 0.3}),
    "five": (56, (5, 60), 2_000_000_000, NEXT | {"masking_max_ngram": 5, "masking_probability": 0.5}),
    "geometric": (48, (0, 60), 12, NEXT | {"masking_use_geometric_distribution": True}),
}
LENGTHS = {"sequence_length_decoder": 32, "masking_max_ngram": 10}
T5: dict[str, Case] = {
    "plain": (64, (0, 60), 1234, LENGTHS),
    "some_documents": (64, (20, 41), 8, LENGTHS),
    "tokens": (64, (0, 60), 5, LENGTHS | {"masking_do_full_word": False, "masking_probability": 0.25}),
    "inverse": (64, (0, 60), 6, LENGTHS | {"masking_use_geometric_distribution": False, "masking_max_ngram": 4}),
}
