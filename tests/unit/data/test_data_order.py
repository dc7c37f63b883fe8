"""Compare the data order with a reference implementation of ten lines."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Phase_
from hypothesis import strategies as st

from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig, SourceConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import document_runs
from hlat.data.data_loader import build_data_loader, merge_state_dicts
from hlat.data.training_data import open_training_data

LENGTH, EOS = 16, "<|endoftext|>"
SEGMENT = 4 * LENGTH
WORDS = ["red", "blue", "été", "木曜日", "x+y", "\n\n", "  two", "\ud7ff", "3.14", "<|endoftext|>"]


def compute_reference(documents, stages, point, num_tokens):
    """Return the tokens of one stream.

    `documents` yields the tokens of each source's documents, `stages` has the length and weights of
    each stage, and `point` in [0, 1) selects the first source.
    """
    pending, out = {name: [] for name in documents}, []
    for length, shares in stages:
        read, begin = dict.fromkeys(documents, 0), len(out)
        source = next(n for n in shares if point < sum(s for m, s in shares.items() if m <= n))
        while len(out) < min(begin + length, num_tokens):
            pending[source] = pending[source] or next(documents[source])
            num_free = min(len(out) // LENGTH * LENGTH + SEGMENT, begin + length) - len(out)
            out, num_read = out + pending[source][:num_free], min(num_free, len(pending[source]))
            pending[source], read[source] = pending[source][num_read:], read[source] + num_read
            due = [n for n in shares if read[n] <= shares[n] * sum(read.values()) + 1e-3]
            source = min(due, key=lambda n: (read[n] + SEGMENT) / shares[n])
    return out[:num_tokens]


document_lists = st.lists(
    st.one_of(
        st.none(),
        st.just(""),
        st.integers(1, 900).map(lambda n: "木" * n),
        st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join),
        st.integers(200, 1500).map(lambda n: "long story " * n),
    ),
    min_size=2,
    max_size=12,
).map(lambda some: [*some, "never", "empty"])


@st.composite
def generate_runs(draw):
    """Generate a corpus, a timeline, a number of streams and the attempts of a run."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    weight = st.integers(1, 9)
    streams = draw(st.sampled_from([1, 2, 4, 6]))
    stages = draw(
        st.lists(st.tuples(st.integers(1, 12), st.tuples(*[weight] * len(names))), max_size=2)
    )
    divisors = [d for d in (1, 2, 3, 4, 6) if streams % d == 0]
    attempt = st.tuples(
        st.sampled_from(divisors), st.integers(0, 3), st.integers(1, 3), st.integers(0, 12)
    )
    return {
        "texts": {name: draw(document_lists) for name in names},
        "weights": dict(zip(names, draw(st.tuples(*[weight] * len(names))), strict=True)),
        "stages": [(n, dict(zip(names, w, strict=True))) for n, w in stages],
        "streams": streams,
        "seed": draw(st.integers(0, 3)),
        "bos_token": draw(st.sampled_from([None, EOS])),
        "attempts": draw(st.lists(attempt, min_size=1, max_size=4)),
    }


def write_corpus(root, documents):
    for name, rows in documents.items():
        table = pa.table({"text": pa.array(rows, pa.string())})
        with (
            pa.OSFile(str(root / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=5)


class Case:
    """Generated run on disk with its expected and actual tokens."""

    def __init__(self, root, parameters, workers=0):
        write_corpus(root, parameters["texts"])
        self.attempts, self.seed, self.workers = parameters["attempts"], parameters["seed"], workers
        self.bos_token = parameters["bos_token"]
        self.batch = BatchConfig(parameters["streams"], 1, LENGTH)
        per_step = parameters["streams"] * LENGTH
        self.stages = [(n * LENGTH, weights) for n, weights in parameters["stages"]]
        self.stages.append((10**9, parameters["weights"]))
        timeline = [
            PhaseStage(str(i), n * per_step, w) for i, (n, w) in enumerate(parameters["stages"])
        ]
        self.phase = PhaseConfig("p", [*timeline, PhaseStage("last", None, parameters["weights"])])
        self.root, self.sources = (
            root,
            {n: SourceConfig([f"{n}.arrow"]) for n in parameters["texts"]},
        )

    def data(self, prefetch):
        return DataConfig(
            "x", str(self.root), self.sources, tokenizer="embedded", eos_token=EOS,
            bos_token=self.bos_token, heldout_documents=1, workers=self.workers, prefetch=prefetch,
        )  # fmt: skip

    def read_tokens(self):
        """Read with consecutive attempts, each resumed from the JSON of the previous one."""
        rows, state = [], None
        for ranks, prefetch, micro_batch_size, steps in self.attempts:
            batch = BatchConfig(self.batch.global_batch_size, micro_batch_size, LENGTH)
            loaders = [
                build_data_loader(self.data(prefetch), self.phase, batch, self.seed, rank, ranks)
                for rank in range(ranks)
            ]
            for one in loaders:
                if state is not None:
                    one.load_state_dict(json.loads(state))
            for _ in range(steps):
                step = np.empty((batch.global_batch_size, LENGTH), np.int32)
                for rank, one in enumerate(loaders):
                    step[rank::ranks] = one.next_batch().tokens
                rows.append(step)
            state = json.dumps(merge_state_dicts([one.state_dict() for one in loaders]))
            for one in loaders:
                one.close()
        empty = np.empty((batch.global_batch_size, 0), np.int32)
        return np.concatenate([empty, *rows], axis=1).tolist()

    def compute_expected(self, num_tokens):
        opened = open_training_data(self.data(0), self.phase, self.batch, self.seed)
        streams = self.batch.global_batch_size
        stages = [
            (length, {n: weights[n] / sum(weights.values()) for n in sorted(weights)})
            for length, weights in self.stages
        ]

        def documents(source, number):
            position = number
            while True:
                text = str(source.read_training_document(position), "utf-8")
                (tokens,) = opened.tokenizer.encode_chunks([text])
                eos = opened.tokenizer.eos_token_id
                if len(tokens):
                    yield [*([eos] if self.bos_token else []), *tokens.tolist(), eos]
                position += streams

        return [
            compute_reference(
                {name: documents(source, number) for name, source in opened.sources.items()},
                stages,
                (number + 0.5) / streams,
                num_tokens,
            )
            for number in range(streams)
        ]


def check_run(root, parameters, workers=0) -> None:
    case = Case(root, parameters, workers)
    read_tokens = case.read_tokens()
    assert read_tokens == case.compute_expected(len(read_tokens[0]))


ANY_RUN = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@settings(ANY_RUN, max_examples=25)
@given(parameters=generate_runs())
def test_runs_equal_the_reference(tmp_path_factory, parameters) -> None:
    """Vary corpora, weights, phases, ranks, micro batches, prefetch and resumes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_runs, "CHUNK_BYTES", 600)
        check_run(tmp_path_factory.mktemp("run"), parameters)


@pytest.mark.slow
@settings(ANY_RUN, max_examples=100)
@given(parameters=generate_runs())
def test_many_runs_equal_the_reference(tmp_path_factory, parameters) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_runs, "CHUNK_BYTES", 600)
        check_run(tmp_path_factory.mktemp("run"), parameters)


# Shrinking is disabled because an example takes a second
WITH_WORKERS = settings(ANY_RUN, phases=[Phase_.explicit, Phase_.generate])


@settings(WITH_WORKERS, max_examples=2)
@given(parameters=generate_runs(), workers=st.integers(1, 3))
@pytest.mark.slow
def test_runs_with_workers_equal_the_reference(tmp_path_factory, parameters, workers) -> None:
    parameters["attempts"] = parameters["attempts"][:2]
    check_run(tmp_path_factory.mktemp("run"), parameters, workers)


@pytest.mark.slow
@settings(WITH_WORKERS, max_examples=8)
@given(parameters=generate_runs(), workers=st.integers(1, 3))
def test_many_runs_with_workers_equal_the_reference(tmp_path_factory, parameters, workers) -> None:
    check_run(tmp_path_factory.mktemp("run"), parameters, workers)
