"""Scores and generated text of edge cases equal lm-evaluation-harness with transformers."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")
pytest.importorskip("accelerate", reason="the harness's own adapter needs accelerate")
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hlat.config.config_errors import ConfigError
from hlat.engine.engine_factory import create_engine
from hlat.evaluate import evaluation_results, lm_eval_tasks
from hlat.evaluate.command_broadcast import CommandBroadcaster
from hlat.evaluate.lm_eval_adapter import LMEvalAdapter, validate_generation_settings
from hlat.inference import model_source
from hlat.inference.chat_format import ChatFormat
from hlat.inference.inference_config import build_inference_config
from hlat.inference.inference_model import InferenceModel
from tests.support.harness_items import write_random_model

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the harness and what it imports
    pytest.mark.slow,  # imports transformers and the harness
]
MAX_LENGTH = 64
STOP = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a random model with a second special token in its tokenizer."""
    return write_random_model(tmp_path_factory.mktemp("model"), MAX_LENGTH, (STOP,))


@pytest.fixture
def adapter(folder) -> Iterator[LMEvalAdapter]:
    source = model_source.find_model(str(folder))
    engine = create_engine(config := build_inference_config(source, ()))
    engine.build(config, training=False, initialize=False)
    source.load_weights(engine.state_shards())
    scheduler = CommandBroadcaster(
        InferenceModel(engine), source.tokenizer, engine.parallel_state.world_group
    )
    yield LMEvalAdapter(scheduler, source.sequence_length)
    engine.close()


def harness(folder: Path) -> HFLM:
    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)


def request(request_type: str, *arguments: Any) -> Instance:
    return Instance(request_type, {}, arguments, 0)


ODD_PAIRS = [
    *(("The sum is", " four"), ("The sum is ", "four"), ("The sum is  ", " four")),
    *(("", "four"), ("été 木 ", "木"), ("a\n\n", "\nb"), ("wor", "ld"), ("x", " " * 5)),
    *(("same", " answer"), ("same", " answer")),
    ("long " * 100, " answer"),
    ("short", " answer" * 10),
]


def test_log_likelihoods_of_odd_pairs_are_equal(adapter, folder) -> None:
    requests = [request("loglikelihood", *pair) for pair in ODD_PAIRS]
    expected = harness(folder).loglikelihood(requests)
    found = adapter.loglikelihood(requests)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], rel=1e-6, abs=1e-5
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert adapter.num_truncated == 1


def test_rolling_log_likelihoods_are_equal(adapter, folder) -> None:
    texts = ["x", "été 木 " * 5, " leading and trailing ", "\n", "words of a text " * 30]
    requests = [request("loglikelihood_rolling", text) for text in texts]
    expected = harness(folder).loglikelihood_rolling(requests)
    assert adapter.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-4, rel=1e-6)


def generated_token(adapter: LMEvalAdapter, prompt: str, position: int) -> int:
    """Return the greedy token at a position after a prompt."""
    ids = adapter._scheduler.generate(
        [adapter.tok_encode(prompt)],
        (),
        {"max_new_tokens": position + 1, "temperature": 0.0, "top_p": 1.0, "seed": 0},
    )
    return ids[0][position]


def test_generated_text_is_equal(adapter, folder) -> None:
    settings = [
        {"max_gen_toks": 12},
        {"max_gen_toks": 12, "until": ["e", "\n"], "do_sample": False, "temperature": 0.7},
        {"max_gen_toks": 12, "until": "never", "repetition_penalty": 1.0, "num_beams": 1},
    ]
    prompts = ["The sum is", " ", "été 木 ", "long " * 100]
    requests = [request("generate_until", text, each) for each in settings for text in prompts]
    assert adapter.generate_until(requests) == harness(folder).generate_until(requests)


def test_a_second_end_token_of_generation_config_ends_a_text(adapter, folder, tmp_path) -> None:
    other = tmp_path / "model"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    end = generated_token(adapter, "The sum is", 3)
    eos = adapter.eot_token_id
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, end]}))
    requests = [request("generate_until", "The sum is", {"max_gen_toks": 12})]
    (expected,) = harness(other).generate_until(requests)
    source = model_source.find_model(str(other))
    adapter._scheduler.tokenizer.end_token_ids = source.tokenizer.end_token_ids
    assert adapter.generate_until(requests) == [expected]
    assert len(adapter.tok_encode(expected)) <= 4


def test_a_special_token_ends_a_text(adapter, folder, tmp_path) -> None:
    token = generated_token(adapter, "The sum is", 3)
    other = tmp_path / "model"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    # The greedy token and the special one exchange their rows of the head
    model = transformers.LlamaForCausalLM.from_pretrained(other)
    special = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json")).token_to_id(STOP)
    with torch.no_grad():
        model.lm_head.weight[[token, special]] = model.lm_head.weight[[special, token]]
    model.save_pretrained(other)
    source = model_source.find_model(str(other))
    engine = create_engine(config := build_inference_config(source, ()))
    engine.build(config, training=False, initialize=False)
    source.load_weights(engine.state_shards())
    scheduler = CommandBroadcaster(
        InferenceModel(engine), source.tokenizer, engine.parallel_state.world_group
    )
    changed = LMEvalAdapter(scheduler, source.sequence_length)
    requests = [request("generate_until", "The sum is", {"until": [STOP], "max_gen_toks": 12})]
    expected = harness(other).generate_until(requests)
    assert changed.generate_until(requests) == expected
    assert len(changed.tok_encode(expected[0])) <= 3
    engine.close()


def test_a_continuation_longer_than_the_model_is_refused(adapter, folder) -> None:
    requests = [request("loglikelihood", "a", " word" * 2 * MAX_LENGTH)]
    with pytest.raises(ConfigError, match=f"longer than the {MAX_LENGTH} positions"):
        adapter.loglikelihood(requests)
    with pytest.raises(AssertionError):
        harness(folder).loglikelihood(requests)


def test_empty_text_has_one_behaviour(adapter) -> None:
    """Check requests for which the harness's adapter fails with an assertion."""
    pairs = [(" ", "word"), ("word", "")]
    found = adapter.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    expected = adapter.loglikelihood([request("loglikelihood", "", " word")])
    assert found == [*expected, (0.0, True)]
    assert adapter.num_empty_continuations == 1
    assert adapter.generate_until([request("generate_until", "", {"max_gen_toks": 2})]) != [""]
    assert adapter.num_empty_contexts == 2


def test_a_system_message_that_the_template_rejects_is_left_out(adapter, folder) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    peer = harness(folder)
    peer.tokenizer.chat_template = template
    chat = LMEvalAdapter(adapter._scheduler, MAX_LENGTH, ChatFormat(template))
    prompt = chat.apply_chat_template(messages)
    assert prompt == peer.apply_chat_template(messages)
    assert chat.num_without_system == 1
    assert chat.tok_encode(prompt) == peer.tok_encode(prompt)
    assert len(chat.tok_encode(prompt)) < len(adapter.tok_encode(prompt)), "special tokens"
    failing = ChatFormat("{{ raise_exception('no user') }}")
    with pytest.raises(ConfigError, match="no user"):
        LMEvalAdapter(adapter._scheduler, MAX_LENGTH, failing).apply_chat_template(messages)


@pytest.mark.parametrize(
    "settings",
    [
        *({"top_k": 5}, {"repetition_penalty": 1.2}, {"num_beams": 4}),
        *({"no_repeat_ngram_size": 2}, {"do_sample": True}, {"do_sample": True, "temperature": 0}),
    ],
)
def test_unsupported_generation_settings_are_refused(adapter, settings) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        adapter.generate_until([request("generate_until", "a", settings)])


def test_neutral_generation_settings_are_accepted() -> None:
    validate_generation_settings({"top_k": 0, "num_beams": 1, "until": ["\n"], "do_sample": False})


def test_tasks_that_shuffle_while_they_load_are_seeded(monkeypatch) -> None:
    class Task:
        OUTPUT_TYPE = "multiple_choice"

        def __init__(self) -> None:
            self.order = random.sample(range(100), 5), np.random.permutation(100)[:5].tolist()

        def get_config(self, key: str) -> Any:
            return None

        def set_config(self, key: str, value: Any) -> None:
            pass

        def set_fewshot_seed(self, seed: int) -> None:
            pass

    class Manager:
        def load(self, names: list[str]) -> dict[str, Any]:
            return {"tasks": {names[0]: Task()}, "groups": {}}

    loader = lm_eval_tasks.TaskLoader(None)
    monkeypatch.setattr(lm_eval_tasks.TaskLoader, "_task_manager", Manager())
    spec = lm_eval_tasks.TaskSpec("gpqa", None, "")
    orders = [loader.load_task(spec)["tasks"]["gpqa"].order for _ in range(2)]
    random.seed(0)
    np.random.seed(1234)
    assert orders == [Task().order] * 2


def test_only_proportions_are_percentages() -> None:
    metrics = {
        "acc,none": (0.25, 0.012, "acc 25.00% (1.20)"),
        "pass@1,unbiased": (0.5, None, "pass@1 50.00%"),
        "bits_per_byte,none": (3.4722, None, "bits_per_byte 3.4722"),
        "word_perplexity,none": (414966.0, None, "word_perplexity 414966.0000"),
        "likelihood_diff,none": (108.98, 1.5, "likelihood_diff 108.9800 (1.5000)"),
    }
    for name, (value, error, expected) in metrics.items():
        assert evaluation_results.format_metric(name, value, error) == expected
