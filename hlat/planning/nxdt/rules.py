"""What keys of NeuronX Distributed Training mean where a copy of the value would not do.

Each rule is one small function from the file and a value to the overrides of hlat that train the
same, read from the code of NxDT that uses the key. hlat.planning.nxdt.tables names them.
"""

from pathlib import PurePosixPath
from typing import Any

from hlat.planning.nxdt.file import MODEL_CONFIG, File
from hlat.planning.nxdt.outcome import REMOVED, Outcome, Rule, copied_to, left, mapped, needless
from hlat.planning.nxdt.recipe import SR_SPELLINGS, recipe_of

_CC_FLAGS = {
    **dict.fromkeys(
        ("bf16SR", "mixed_precision", *SR_SPELLINGS), "--enable-mixed-precision-accumulation"
    ),
    "autocast": "--enable-mixed-precision-accumulation --auto-cast none",
    "fp32": "--auto-cast none",
}
"""Flags that NxDT adds to compiler_flags, by precision.type (training_orchestrator.py)."""
_HARDWARE = {32: "trn1_32xl", 64: "trn2_48xl"}
"""Presets by devices of a node; a trn2 node has 64 of two cores each (lnc 2)."""


def given(key: str) -> Rule:
    """A number that hf takes from model_config where the YAML says -1 (llama_model.py)."""

    def rule(file: File, value: Any) -> Outcome:
        return needless("-1 leaves it to model_config") if value == -1 else copied_to(key, value)

    return rule


def read_unless_given(key: str) -> Rule:
    """The same number in model_config; in the YAML it has the same name as in hlat."""

    def rule(file: File, value: Any) -> Outcome:
        own = file.get(key, -1) != -1
        return needless(f"{key} goes before it") if own else copied_to(key, value)

    return rule


def key_value_heads(file: File, value: Any) -> Outcome:
    """None: one for each query head."""
    heads = "model.num_attention_heads" if not file.hf else f"{MODEL_CONFIG}num_attention_heads"
    return copied_to("model.num_key_value_heads", file.get(heads) if value is None else value)


def scaled_init(file: File, value: Any) -> Outcome:
    """Megatron's std / sqrt(2 L) for output projections (gpt_model.py); hf has none."""
    return mapped({"model.scaled_init": "depth" if value else "none"})


def hf_init_std(file: File, value: Any) -> Outcome:
    """Every matrix of hf alike (modeling_llama.py)."""
    return mapped({"model.init_std": value, "model.scaled_init": "none"})


def sequence_length(file: File, value: Any) -> Outcome:
    """data.seq_length, where model.encoder_seq_length does not say the same."""
    encoder = file.get("model.encoder_seq_length")
    if encoder is None:
        return copied_to("batch.sequence_length", value)
    if encoder == value:
        return needless("model.encoder_seq_length says the same")
    return left(f"differs from model.encoder_seq_length={encoder}, which was taken")


def window(file: File, value: Any) -> Outcome:
    """A window of the whole sequence hides nothing (megatron/transformer.py)."""
    if value in (None, file.get("model.encoder_seq_length")):
        return needless("the whole sequence")
    return left("attention sees the whole sequence")


def document_mask(file: File, value: Any) -> Outcome:
    """NxDT resets positions and cannot reset the mask; hlat does both or neither."""
    return left("positions restart only together with data.document_mask") if value else _off()


def tokenizer(file: File, value: Any) -> Outcome:
    """A folder of Hugging Face's holds a tokenizer.json; anything else is a library's name."""
    if "/" not in str(value):
        return left("name a tokenizer.json")
    return mapped({"data.tokenizer": f"{str(value).rstrip('/')}/tokenizer.json"})


def sequence_parallel(file: File, value: Any) -> Outcome:
    """Nothing without tensor parallelism."""
    tp = file.get("distributed_strategy.tensor_model_parallel_size", 1)
    return mapped({"parallelism.sequence_parallel": bool(value) and tp > 1})


def pipeline_chunks(file: File, value: Any) -> Outcome:
    """Several model chunks per rank are an interleaved pipeline; null is 1."""
    chunks = value or 1
    order = "interleaved" if chunks > 1 else "one_f_one_b"
    return mapped({"parallelism.stages_per_rank": chunks, "parallelism.pipeline_schedule": order})


def zero1(file: File, value: Any) -> Outcome:
    """Optimizer states over the data-parallel ranks, or whole everywhere."""
    return mapped({"parallelism.zero": 1 if value else 0})


def recomputed(file: File, value: Any) -> Outcome:
    """Granularity, with the modules of a selective one; without any, hf may pick attention."""
    key = "parallelism.activation_checkpointing"
    modules = file.get("model.activations_checkpoint_recompute") or []
    if value == "full":
        return mapped({key: "full"})
    if value == "selective":
        same = set(modules) == {"CoreAttention", "ActivationMultiplyMLP"}
        note = "" if same else "hlat recomputes core attention and the SwiGLU product"
        return mapped({key: "selective" if modules else "none"}, note if modules else "")
    if file.hf and not file.get("model.fusions.flash_attention"):
        return mapped({key: "selective"}, "without flash attention NxDT recomputes core attention")
    return mapped({key: "none"})


def betas(file: File, value: Any) -> Outcome:
    """Decays of both moments."""
    first, second = value
    return mapped({"optimizer.beta1": first, "optimizer.beta2": second})


def algorithm(file: File, value: Any) -> Outcome:
    """AdamW; adamw_fp32OptState keeps its moments in fp32 whatever the weights are."""
    if value not in ("adamw", "adamw_fp32OptState"):
        return left("hlat has AdamW alone")
    recipe = recipe_of(file)
    alone = value == "adamw_fp32OptState" and recipe.get("precision") == "bf16"
    note = "moments in fp32 beside bf16 weights; hlat has both in the same dtype" if alone else ""
    return mapped({"optimizer.name": "adamw"}, note)


def weight_decay(file: File, value: Any) -> Outcome:
    """For hf models 0.01 is written into the parameter groups (utils/model_utils.py)."""
    if not file.hf or value == 0.01:
        return copied_to("optimizer.weight_decay", value)
    return mapped(
        {"optimizer.weight_decay": 0.01},
        "NxDT decays hf models by 0.01 whatever this says",
    )


def decay_norms(file: File, value: Any) -> Outcome:
    """For hf models true exempts norms (hf_models/base_model.py), for Megatron's it is the word."""
    note = "in NxDT true exempts the norms of hf models, and false does not" if file.hf else ""
    return mapped({"optimizer.decay_norms": bool(value) is not file.hf}, note)


def grad_clip(file: File, value: Any) -> Outcome:
    """None: no clipping, which is 0 in hlat."""
    if value == 0:
        return left("0 would scale every gradient to nothing; in hlat it means no clipping")
    return mapped({"optimizer.grad_clip": 0 if value is None else value})


def schedule(file: File, value: Any) -> Outcome:
    """NeMo's CosineAnnealing, a line to zero, or without a schedule the peak at all times."""
    warmup = file.get("model.optim.sched.warmup_steps", 0)
    if value is None:
        told = {"name": "constant", "warmup_steps": 0, "min_lr_ratio": None}
    elif value == "LinearAnnealingWithWarmUp":
        told = {"name": "linear", "warmup_steps": warmup, "min_lr_ratio": 0}
    elif value == "CosineAnnealing":
        floor = file.get("model.optim.sched.min_lr", 0) / file.get("model.optim.lr", 0)
        told = {"name": "cosine", "warmup_steps": warmup, "min_lr_ratio": float(f"{floor:.12g}")}
    else:
        return left("hlat has cosine, linear, constant and wsd")
    return mapped({f"schedule.{key}": told[key] for key in told} | {"schedule.decay_steps": None})


def held_floor(file: File, value: Any) -> Outcome:
    """Steps at min_lr after the cosine's end."""
    return left("hlat's cosine reaches min_lr with the last step") if value else _off()


def schedule_steps(file: File, value: Any) -> Outcome:
    """NxDT writes trainer.max_steps over it (model/base.py)."""
    return needless("NxDT takes trainer.max_steps")


def devices(file: File, value: Any) -> Outcome:
    """Processes of a node, from which the kind of node is told."""
    preset = _HARDWARE.get(value)
    if preset is not None:
        return mapped({"hardware": preset})
    nearest = "trn2_48xl" if value > 64 else "trn1_32xl"
    return mapped(
        {"hardware": nearest, "hardware.processes_per_node": value},
        f"no preset has {value} devices a node: check the figures of hardware={nearest}",
    )


def cores_per_device(file: File, value: Any) -> Outcome:
    """Logical NeuronCores: 2 physical ones each on trn2."""
    usual = 2 if file.get("trainer.devices") == 64 else 1
    if value in (None, usual):
        return needless("as the hardware preset counts devices")
    return left("the hardware preset counts devices otherwise; check hardware.memory_gib")


def epochs(file: File, value: Any) -> Outcome:
    """Runs end by steps."""
    return needless("runs end by steps") if value in (-1, None) else left("runs end by steps")


def evaluated_every(file: File, value: Any) -> Outcome:
    """Steps between evaluations, where any are made and the run is long enough for one."""
    if not isinstance(value, int):
        return left("a share of an epoch; hlat counts steps")
    within = file.get("trainer.limit_val_batches") and value <= file.get("trainer.max_steps", value)
    return mapped({"evaluation.every_steps": value if within else None})


def evaluated_batches(file: File, value: Any) -> Outcome:
    """Global batches of an evaluation."""
    if value == 0:
        return needless("evaluation.every_steps says so")
    if not isinstance(value, int):
        return left("a share of the validation set; set evaluation.sequences_per_source")
    sequences = value * file.get("data.global_batch_size")
    return mapped({"evaluation.sequences_per_source": sequences})


def run_folder(file: File, value: Any) -> Outcome:
    """explicit_log_dir: root and name at once."""
    if value is None:
        return needless("it is not set")
    path = PurePosixPath(str(value))
    return mapped({"run.root": str(path.parent), "run.name": path.name})


def run_root(file: File, value: Any) -> Outcome:
    """exp_dir, which explicit_log_dir goes before."""
    if value is None or file.get("exp_manager.explicit_log_dir") is not None:
        return needless("it is not set" if value is None else "explicit_log_dir goes before it")
    return mapped({"run.root": value})


def run_name(file: File, value: Any) -> Outcome:
    """The experiment's name, which explicit_log_dir goes before."""
    if file.get("exp_manager.explicit_log_dir") is not None:
        return needless("explicit_log_dir goes before it")
    return needless("hlat names the run") if value is None else mapped({"run.name": value})


def resumed(file: File, value: Any) -> Outcome:
    """Whether a run goes on from its own folder."""
    if value:
        return needless("a run goes on from its own folder")
    return left("a run goes on from its own folder; another run.name starts anew")


def resumed_from(file: File, value: Any) -> Outcome:
    """A checkpoint of NxDT."""
    if value is None:
        return needless("it is not set")
    if file.hf:
        return left("its weights alone, by model.init_from; see docs/migration.md")
    return left("make it a Hugging Face folder, then model.init_from; see docs/migration.md")


def saved(file: File, value: Any) -> Outcome:
    """Whether checkpoints are written."""
    return needless("always saved") if value else left("always saved; see checkpoint.every_steps")


def kept(file: File, value: Any) -> Outcome:
    """Checkpoints that stay, the newest where steps are monitored; -1: all of them."""
    folder = "exp_manager.checkpoint_callback_params."
    every = file.get(f"{folder}every_n_train_steps")
    if value == 0:
        return left("always saved; see checkpoint.every_steps")
    if value == -1:
        return mapped({"checkpoint.keep_last": 1, "checkpoint.keep_every_steps": every})
    return mapped({"checkpoint.keep_last": value, "checkpoint.keep_every_steps": None})


def ranked_by(file: File, value: Any) -> Outcome:
    """By what checkpoints are ranked."""
    usual = {"monitor": "step", "mode": "max"}
    if value in usual.values():
        return needless("the newest are kept")
    return left("the newest are kept")


def compiler_flags(file: File, value: Any) -> Outcome:
    """NEURON_CC_FLAGS, with what NxDT adds for the precision."""
    added = _CC_FLAGS.get(file.get("precision.type"), "")
    return mapped({"compiler.cc_flags": f"{value or ''} {added}".split()})


def softmax(file: File, value: Any) -> Outcome:
    """NEURON_FUSE_SOFTMAX, set or not there."""
    if value:
        return _variable("NEURON_FUSE_SOFTMAX", 1)
    return mapped({"~compiler.environment.NEURON_FUSE_SOFTMAX": REMOVED})


def compressed_groups(file: File, value: Any) -> Outcome:
    """NEURON_EXPERIMENTAL_COMPRESS_RG."""
    return _variable("NEURON_EXPERIMENTAL_COMPRESS_RG", 1 if value is True else 0)


def model_config(file: File, value: Any) -> Outcome:
    """The config.json of an hf model."""
    if not file.hf:
        return needless("NxDT reads it for hf models only")
    if any(key.startswith(MODEL_CONFIG) for key in file.leaves):
        return needless("read")
    return left("is not here, nor beside the YAML; it says what is ??? above")


def _variable(name: str, value: Any) -> Outcome:
    return mapped({f"++compiler.environment.{name}": value})


def _off() -> Outcome:
    return needless("off in hlat too")
