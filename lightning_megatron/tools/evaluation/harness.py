"""An adapter for EleutherAI's lm-eval, whose tasks then run in any layout (https://github.com/EleutherAI/lm-evaluation-harness).

All ranks run all of lm-eval with the same requests, and compute each of its calls together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from lightning_megatron.data.tokenizers import Tokenizer
from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.models.generate import Sampling
from lightning_megatron.tools.evaluation.continuing import continuations
from lightning_megatron.tools.evaluation.corpora import Encoding
from lightning_megatron.tools.evaluation.ranks import Ranks
from lightning_megatron.tools.evaluation.steps import scores
from lightning_megatron.tools.evaluation.windows import Window, collate, groups

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_MAX_GEN_TOKS = 256
_RESAMPLED = 1000
"""Bootstrap samples for the standard errors of metrics that have no formula for them."""


class MegatronLM(TemplateLM):
    """A decoder on the ranks of a layout, in the interface that lm-eval needs.

    Args:
        ranks: the ranks.
        max_length: tokens that the model sees at once.

    Raises:
        ConfigError: if the tokenizer has no token that begins or ends a text.
    """

    def __init__(self, ranks: Ranks, tokenizer: Tokenizer, max_length: int) -> None:
        super().__init__()
        self._ranks, self._tokens, self._encoding = ranks, tokenizer, Encoding(tokenizer)
        self.max_length = max_length
        if self._encoding.begin is None:
            reason = "has no token that begins or ends a text, which lm-eval puts before the first one"
            raise ConfigError([Problem("--tokenizer-type", type(tokenizer).__name__, reason)])

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        end = self._tokens.eod
        return self.prefix_token_id if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        begin = self._encoding.begin
        assert begin is not None
        return begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Tokens of a text, with the tokenizer's own token before it unless ``add_special_tokens`` is False."""
        encode = self._encoding.inside if add_special_tokens is False else self._encoding.whole
        return encode(string)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text; each token is predicted once, in windows of the largest length."""
        found, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for before, after in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                found.append(Window([*before, after[-1]], len(after)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (total, _) in zip(owners, self._scored(found), strict=True):
            totals[number] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        found: list[Window] = []
        for pair, before, after in requests:
            if not after or len(after) > self.max_length:
                reason = f"has {len(after)} tokens, and 1 to {self.max_length} can be predicted"
                raise ConfigError([Problem("continuation", (pair or ("", ""))[1][:40], reason)])
            found.append(Window([*before, *after][-self.max_length - 1 :], len(after)))
        answers = self._scored(found)
        for (pair, *_), answer in zip(requests, answers, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, without the stop words."""
        answers = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in kinds.values():
            options = dict(requests[numbers[0]].args[1])
            texts = self._continued([requests[number].args[0] for number in numbers], options)
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _continued(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        count = next((int(options[name]) for name in _LENGTHS if options.get(name) is not None), _MAX_GEN_TOKS)
        longest = self.max_length - count
        if longest < 1:
            reason = f"the model sees {self.max_length} tokens at once, and none is left for the context"
            raise ConfigError([Problem("max_gen_toks", count, reason, (self.max_length // 2,))])
        words = [word for word in handle_stop_sequences(options.get("until"), eos=None) if word]
        sampling = _sampling(options)
        prompts = [self.tok_encode(context)[-longest:] or [self.prefix_token_id] for context in contexts]

        def ends(ids: Sequence[int]) -> bool:
            return ids[-1] == self.eot_token_id or any(word in self._tokens.decode(ids) for word in words)

        texts = []
        for ids in continuations(self._ranks, prompts, count, sampling, ends):
            text = self._tokens.decode(ids[:-1] if ids[-1] == self.eot_token_id else ids)
            for word in words:
                text = text.split(word)[0]
            texts.append(text)
        return texts

    def _scored(self, found: Sequence[Window]) -> list[tuple[float, bool]]:
        """Log-likelihood of each window's end, and True if its tokens are the likeliest ones; long windows first."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(found)
        order = sorted(range(len(found)), key=lambda number: -len(found[number].tokens))
        for some in groups(order, self._ranks.rows * self._ranks.mesh.layout.pp):
            result = self._ranks.run(scores, collate([found[number] for number in some], self.max_length))
            totals = result["losses"].double().sum(dim=1).neg().tolist()
            likeliest = result["likeliest"].all(dim=1).tolist()
            for number, total, best in zip(some, totals, likeliest, strict=True):
                answers[number] = total, best
        return answers


def _sampling(options: dict[str, Any]) -> Sampling:
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") is False:
        temperature = 0.0
    if options.get("do_sample") and not temperature:
        temperature = 1.0
    return Sampling(temperature, options.get("top_k") or None, options.get("top_p"))


def task_results(
    ranks: Ranks,
    tokenizer: Tokenizer,
    max_length: int,
    tasks: Sequence[str],
    *,
    path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Results of tasks by their names, as lm-eval returns them; empty on ranks where it returns none.

    Args:
        ranks: the ranks; all of them call this alike.
        max_length: tokens that the model sees at once.
        tasks: names of the tasks.
        path: directory with further tasks; ``None`` for none.
        num_fewshot: examples before each question; ``None`` for the task's.
        limit: maximum number of questions of each task; ``None`` for all.

    Raises:
        ConfigError: for a task that lm-eval does not know.
    """
    manager = TaskManager(include_path=path)
    known = set(manager.all_tasks)
    raise_if_any(
        Problem("--lm-eval", name, "lm-eval has no such task", nearest_names(name, sorted(known)))
        for name in tasks
        if name not in known
    )
    told = simple_evaluate(
        model=MegatronLM(ranks, tokenizer, max_length),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=_RESAMPLED,
    )
    return {} if told is None else dict(told["results"])  # only the first process of a machine gets results
