"""Sampling with extreme settings, and log probabilities of the most likely tokens."""

import pytest
import torch

from hlat.model.token_sampling import RANDOM_RANGE, compute_top_log_probs, sample_tokens

HEAD = torch.eye(5)
LOGITS = torch.tensor([[0.0, 3.0, -2.0, 3.5, 1.0], [80.0, -80.0, 0.0, 79.0, 79.5]])
BITS = torch.tensor([0, RANDOM_RANGE // 2, RANDOM_RANGE - 1])


def sample(temperature: float, top_p: float) -> list[list[int]]:
    """Return the samples of each row of logits with the smallest, middle and largest bits."""
    return [
        sample_tokens(
            row.expand(3, -1),
            HEAD,
            BITS,
            torch.full((3,), temperature, dtype=torch.float64).float(),
            torch.full((3,), top_p, dtype=torch.float64),
        ).tolist()
        for row in LOGITS
    ]


@pytest.mark.parametrize("temperature", [1e-4, 1e-39, 1e-46, 1e-320])
def test_tiny_temperatures_select_the_most_likely_token(temperature: float) -> None:
    assert sample(temperature, 1.0) == [[3] * 3, [0] * 3]


@pytest.mark.parametrize("top_p", [1e-9, 1e-10, 1e-300])
def test_a_tiny_nucleus_contains_the_most_likely_token(top_p: float) -> None:
    assert sample(1.0, top_p) == [[3] * 3, [0] * 3]
    assert sample(1e308, top_p) == [[0, 2, 4]] * 2, "all tokens are equally likely"


def test_large_temperatures_sample_uniformly() -> None:
    for temperature in (1e30, 1e38, 1e308):
        assert sample(temperature, 1.0) == [[0, 2, 4]] * 2


def test_each_row_has_its_settings() -> None:
    temperatures, top_ps = torch.tensor([1e-9, 1e9, 1.0]), torch.tensor([1.0, 1.0, 0.1])
    rows = LOGITS[:1].expand(3, -1)
    bits = torch.full((3,), RANDOM_RANGE - 1)
    assert sample_tokens(rows, HEAD, bits, temperatures, top_ps).tolist() == [3, 4, 3]


def test_top_log_probs_equal_torch() -> None:
    expected = LOGITS.log_softmax(1)
    log_probs, top, tokens = compute_top_log_probs(LOGITS, HEAD, torch.tensor([2, 0]), 3)
    torch.testing.assert_close(log_probs, expected[[0, 1], [2, 0]])
    torch.testing.assert_close(top, expected.gather(1, tokens))
    assert tokens.tolist() == [[3, 1, 4], [0, 4, 3]]
    assert log_probs[1] == top[1, 0], "the same bits, so that a client recognizes the maximum"
