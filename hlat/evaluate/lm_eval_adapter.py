"""Adapter of `InferenceModel` for EleutherAI's lm-evaluation-harness.

The adapter tokenizes requests exactly as the harness's adapter for transformers does, so that
scores are the same.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    truncate_tokens,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hlat.config.config_errors import ConfigError
from hlat.evaluate.command_broadcast import CommandBroadcaster, ScoreRequest
from hlat.evaluate.harness_settings import (
    DEFAULT_SEEDS,
    HarnessSettings,
    validate_generation_settings,
)
from hlat.inference.chat_format import ChatFormat


class LMEvalAdapter(TemplateLM):  # type: ignore[misc]
    """Model interface of lm-evaluation-harness, with a maximum sequence length in tokens.

    With a chat format, names of special tokens in a prompt stand for these tokens. `seed` is that
    of generation.
    """

    def __init__(
        self,
        scheduler: CommandBroadcaster,
        max_length: int,
        chat_format: ChatFormat | None = None,
        seed: int = DEFAULT_SEEDS[2],
    ) -> None:
        super().__init__()
        self._scheduler, self._tokenizer = scheduler, scheduler.tokenizer
        self._chat_format, self._seed = chat_format, seed
        self.max_length = max_length
        self.num_without_system = 0
        """Number of prompts without their system message, since the chat template rejects it."""
        self.num_truncated = 0
        """Number of requests whose context was truncated on the left."""
        self.num_empty_contexts = self.num_empty_continuations = 0
        """Number of requests without a token in the context or the continuation."""

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-document token."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that replaces an empty context."""
        return self._tokenizer.prefix_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text, with BOS as in a prompt unless disabled."""
        is_prompt_start = add_special_tokens is not False
        if self._chat_format is None:
            return self._tokenizer.encode(string, is_prompt_start)
        return self._tokenizer.encode_with_special_tokens(string, is_prompt_start)

    @property
    def tokenizer_name(self) -> str:
        """Hash of the tokenizer, which the harness uses in keys."""
        return self._tokenizer.sha256

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, None if prompts have no chat format."""
        return None if self._chat_format is None else self._chat_format.template

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of messages.

        As in the harness, a system message that the template rejects is omitted.
        """
        assert self._chat_format is not None
        try:
            return self._chat_format.render(chat_history, add_generation_prompt)
        except ConfigError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            self.num_without_system += 1
            return self._chat_format.render(others, add_generation_prompt)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, computed in the harness's windows."""
        windows: list[ScoreRequest] = []
        indices = []
        for index, request in enumerate(requests):
            rolling_windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, rolling_windows):
                windows.append(window)
                indices.append(index)
        totals = [0.0] * len(requests)
        for index, (log_prob, _) in zip(indices, self._score(windows, "texts"), strict=True):
            totals[index] += log_prob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text of each request up to the first stop sequence."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for group in groups.values():
            contexts = [requests[i].args[0] for i in group]
            generated = self._generate(contexts, requests[group[0]].args[1])
            for i, text in zip(group, generated, strict=True):
                texts[i] = text
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._score([(context, answer) for _, context, answer in requests], "answers")

    def _score(self, requests: Sequence[ScoreRequest], unit: str) -> list[tuple[float, bool]]:
        """Return the scores of continuations; the score of an empty one is 0.

        Raises:
            ConfigError: A continuation has more tokens than the model has positions.
        """
        longest = max((len(answer) for _, answer in requests), default=0)
        if longest > self.max_length:
            raise ConfigError(
                f"a continuation of {longest} tokens is longer than the {self.max_length} "
                "positions of the model, so it has no score (lm-evaluation-harness raises an "
                "error too); leave this task out, or set limit="
            )
        self.num_empty_continuations += sum(not answer for _, answer in requests)
        truncated = [
            (self._truncate(self._fill(context), self.max_length + 1 - len(answer)), answer)
            for context, answer in requests
        ]
        return self._scheduler.score(truncated, unit)

    def _fill(self, ids: list[int]) -> list[int]:
        """Return the token ids of a context, or the prefix token if there are none."""
        self.num_empty_contexts += not ids
        return ids or [self.prefix_token_id]

    def _truncate(self, ids: list[int], max_length: int) -> list[int]:
        """Return the last tokens of a context, at least one, and count a truncation."""
        shown: list[int] = truncate_tokens(ids, max(1, max_length))
        self.num_truncated += len(shown) < len(ids)
        return shown

    def _generate(self, contexts: Sequence[str], gen_kwargs: dict[str, Any]) -> list[str]:
        validate_generation_settings(gen_kwargs)
        options = normalize_gen_kwargs(gen_kwargs)
        until = handle_stop_sequences(options.get("until"), eos=self._tokenizer.eos_token)
        # The harness's adapter fails if a task may generate more tokens than the model supports
        max_new_tokens = options["max_gen_toks"]
        if max_new_tokens >= self.max_length:
            max_new_tokens = self.max_length // 2
        max_context = self.max_length - max_new_tokens
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": options["temperature"] if options["do_sample"] else 0.0,
            "top_p": options.get("top_p") or 1.0,
            "seed": self._seed,
        }
        stop_sequences = [stop for stop in until if stop]
        prompts = [
            self._truncate(self._fill(self.tok_encode(text)), max_context) for text in contexts
        ]
        generated = self._scheduler.generate(prompts, stop_sequences, sampling)
        return [self._decode_until(ids, stop_sequences) for ids in generated]

    def _decode_until(self, ids: list[int], stop_sequences: list[str]) -> str:
        text: str = postprocess_generated_text(self._tokenizer.decode(ids), stop_sequences, None)
        return text


def run_harness(
    adapter: LMEvalAdapter,
    tasks: dict[str, Any],
    limit: int | None,
    settings: HarnessSettings | None = None,
) -> dict[str, Any]:
    """Run the tasks of `TaskLoader.load_task`; return the harness's results, with all items."""
    settings = settings or HarnessSettings()
    random.seed(settings.seed[0])
    np.random.seed(settings.seed[1])
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results: dict[str, Any] = evaluator.evaluate(
        adapter,
        tasks,
        limit=limit,
        samples={name: [*ids] for name, ids in settings.doc_ids.items()} or None,
        log_samples=True,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.is_multiturn,
    )
    return results
