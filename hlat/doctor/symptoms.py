"""Symptoms of each fault in a run, by check."""

SYMPTOMS = {
    "machine": "results that no other machine reproduces, or steps that wait for one node",
    "initialisation": "no symptom for a long time: HLAT-7B without scaled initial weights diverged "
    "at step 22,000 (slides of the paper)",
    "causality": "a loss that falls too fast, and meaningless generated text: HLAT noticed a mask "
    "that leaked the future after 10,000 steps (slides of the paper)",
    "labels": "a loss that stays at chance level (shift 2 or more) or falls to zero (shift 0)",
    "loss": "a loss that is not comparable with other runs",
    "gradients": "a loss curve that is slightly worse than possible, for the whole run",
    "reduction": "almost no symptom in the loss curve (slides of the paper); ranks train "
    "separately, as with a smaller batch or another learning rate",
    "pipeline": "a smaller batch than configured, or another learning rate",
    "gradient norm": "clipping that depends on the layout: gradient norms jump when a run resumes "
    "on another number of nodes",
    "next step": "a loss that lags behind, or differs between ranks after the first update",
    "accumulation": "other results for another micro batch size or number of nodes",
    "replicas": "a validation loss that depends on the rank whose weights were saved; slow drift "
    "of norms and key/value heads between tensor-parallel ranks (paper, section IV-C)",
    "rounding": "a loss that stops falling after learning rate decay, or growing weights",
    "optimizer": "a rough start (bias correction), or learning rates and weight decay that do not "
    "transfer from other codebases",
    "schedule": "a run that ends at a wrong learning rate",
    "numerics": "a gradient norm that grows slowly while the loss still falls (slides of the "
    "paper)",
    "data": "text that is seen twice or never; a jump of the loss after a restart",
    "checkpoint": "a jump of the loss after a restart or a change of the number of nodes",
}
