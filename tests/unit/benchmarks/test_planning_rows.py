"""Published rows of throughput: their conversion, the fitted constants, and the errors of a plan."""

import json
import statistics
from collections import Counter

import pytest

from benchmarks.planning.compare import (
    build_result,
    compute_quantile,
    select_groups,
    summarize,
    weigh_results,
)
from benchmarks.planning.row_planner import FIT, build_efficiency, load_fit
from benchmarks.planning.throughput_rows import EXCLUDED, load_records, load_rows
from hlat.config.precision import Dtype
from hlat.model.decoder_spec import compute_flops_per_token, count_parameters
from hlat.plan.hardware_efficiency import load_efficiencies


@pytest.fixture(scope="module")
def rows():
    return load_rows()


@pytest.fixture(scope="module")
def results(rows):
    fit = load_fit()
    return [build_result(row, fit) for row in rows]


def test_rows_are_those_of_the_file(rows):
    records = load_records()
    assert Counter(record["split"] for record in records) == {"fit": 44, "test": 135}
    assert {row.row_id for row in rows} == {record["id"] for record in records} - EXCLUDED.keys()
    assert sum(row.is_fitted for row in rows) == 44


def test_configurations_use_all_devices_and_the_batch_of_a_row(rows):
    records = {record["id"]: record for record in load_records()}
    for row in rows:
        record, config = records[row.row_id], row.config
        assert config.num_processes == row.num_devices == int(record["devices"])
        if record["grad_accum"]:
            assert config.num_micro_batches == int(record["grad_accum"]), row.row_id
        tokens = int(record["global_batch"] or 32) * int(record["seq"])
        assert config.batch.tokens_per_step == tokens


def test_parameters_and_mfu_of_mosaic_rows_equal_the_published_ones(rows):
    """llm-foundry counts 6 N + 12 L h s FLOPs per token, N with the embedding once."""
    records = {record["id"]: record for record in load_records()}
    errors = []
    for row in rows:
        if row.framework != "llm-foundry":
            continue
        model, length = row.config.model, row.config.batch.sequence_length
        attention = 12 * model.num_layers * model.hidden_size * length
        flops = 6 * count_parameters(model) + attention
        peak = row.config.hardware.peak_tflops["bf16"] * 1e12
        mfu = 100 * row.published * flops / peak
        errors.append(mfu / float(records[row.row_id]["mfu_reported"]) - 1)
    assert len(errors) == 65
    assert statistics.median(map(abs, errors)) < 0.005
    assert max(map(abs, errors)) < 0.02


def test_mfu_of_nemo_rows_equals_the_published_one(rows):
    """NeMo counts the full attention matrix; its fp8 rows relate to the peak of fp8."""
    records = {record["id"]: record for record in load_records()}
    for row in rows:
        if row.source.startswith("NVIDIA/dgxc-benchmarking llama3.1"):
            length = row.config.batch.sequence_length * row.context_parallel
            flops = compute_flops_per_token(row.config.model, 2 * length)
            peak = row.config.hardware.peak_tflops["fp8" if row.has_float8 else "bf16"] * 1e12
            mfu = 100 * row.published * flops / peak
            reported = float(records[row.row_id]["mfu_reported"])
            assert mfu == pytest.approx(reported, rel=0.01), row.row_id


def test_constants_of_the_planner_are_the_fitted_ones(rows):
    constants, efficiencies = load_fit().constants, load_efficiencies()
    devices = {row.config.hardware.device for row in rows} - {"trn1"}
    assert devices == {"a100", "h100", "h100_500w", "h200", "b200", "gb200"}
    for row in rows:
        device = row.config.hardware.device
        if device == "trn1":
            continue
        used, fitted = efficiencies[device], build_efficiency(row, constants)
        names = ("compute", "float8", "attention", "compiled_passes", "eager_passes")
        for name in (*names, "overlap", "link", "network"):
            assert getattr(used, name) == pytest.approx(getattr(fitted, name), rel=2e-3), name


def test_intervals_of_the_planner_are_those_of_cross_validation():
    found = json.loads(FIT.read_text())["intervals"]
    efficiencies = load_efficiencies()
    for device in ("a100", "h100", "h200"):
        for key, name in (("other framework", "interval"), ("known framework", "layout_interval")):
            low, high = getattr(efficiencies[device], name)
            size = found[device][key]
            assert (low, high) == pytest.approx((2.718281828**-size, 2.718281828**size), abs=1e-3)


def test_weights_of_sources_and_quantiles():
    results = [{"source": "one"}, {"source": "one"}, {"source": "other"}]
    assert weigh_results(results) == [0.25, 0.25, 0.5]
    assert compute_quantile([3.0, 1.0, 2.0], [0.25, 0.25, 0.5], 0.5) == 2.0
    assert compute_quantile([3.0, 1.0, 2.0], [0.25, 0.25, 0.5], 0.9) == 3.0
    assert compute_quantile([3.0, 1.0], [0.5, 0.5], 0.5) == 1.0


def test_errors_of_held_out_rows_are_within_the_targets(results):
    """The targets apply to devices and frameworks with five fitted rows."""
    found = summarize(select_groups(results)["held out, calibrated"])
    assert found["median_error"] <= 0.10
    assert found["p90_error"] <= 0.20
    assert found["largest_error"] <= 0.35
    assert 0.70 <= found["coverage"] <= 0.90


def test_recorded_results_are_those_of_the_planner(results):
    recorded = json.loads(FIT.with_name("throughput.json").read_text())
    assert [one["id"] for one in recorded["rows"]] == [one["id"] for one in results]
    for one, now in zip(recorded["rows"], results, strict=True):
        assert now["planned"] == pytest.approx(one["planned"], rel=1e-9)


def test_precisions_are_those_of_the_sources(rows):
    by_id = {row.row_id: row.config.precision for row in rows}
    assert by_id["R189"].optimizer_state_dtype is Dtype.bf16  # bf16 (PURE)
    assert by_id["R163"].master_weight_dtype is Dtype.fp32  # amp_bf16
    assert by_id["R163"].reduce_dtype is Dtype.bf16
    assert by_id["R082"].reduce_dtype is Dtype.fp32
