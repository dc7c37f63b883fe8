"""What a run shows, and when, of each thing that a check finds."""

SYMPTOMS = {
    "machine": "numbers that no other machine repeats, or a step that waits for one node",
    "initialisation": "nothing for a long time: HLAT-7B without scaled initial weights diverged at "
    "step 22,000 (slides of the paper)",
    "causality": "a loss that falls too well, and text that makes no sense: HLAT saw a mask that "
    "leaked the future after 10,000 steps (slides of the paper)",
    "labels": "a loss that stays where guessing is (shift 2 or more) or falls to zero (shift 0)",
    "loss": "a loss that cannot be compared with any other run's",
    "gradients": "a loss curve that is a little worse than it could be, for the whole run",
    "reduction": "almost nothing in the loss curve (slides of the paper); ranks train apart, as if "
    "the batch were smaller or the rate another one",
    "pipeline": "a batch that is smaller than configured, or a rate that is another one",
    "gradient norm": "clipping that depends on the layout: gradient norms jump where a run goes on "
    "with another number of nodes",
    "next step": "a loss that lags behind, or differs between ranks after the first update",
    "accumulation": "other results for another micro batch size or number of nodes",
    "replicas": "a validation loss that depends on which rank's weights were saved; slow drift of "
    "norms and key/value heads between tensor-parallel ranks (paper, section IV-C)",
    "rounding": "a loss that stops falling when the rate has decayed, or weights that grow without "
    "end",
    "optimizer": "a rough start (bias correction), or rates and decay that other people's settings "
    "do not fit",
    "schedule": "a run that ends at another rate than it should",
    "numerics": "a gradient norm that grows slowly while the loss still falls (slides of the "
    "paper)",
    "data": "text that is seen twice or never; a jump of the loss after a restart",
    "checkpoint": "a jump of the loss after a restart, or after a change of the number of nodes",
}
"""By check."""
