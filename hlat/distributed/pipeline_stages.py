"""Assignment of decoder layers to pipeline stages."""


def assign_layers_to_stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """Return the decoder layers of each pipeline stage, in order.

    If pp does not divide the layers, the stages just before the last get one more. The last stage
    also computes the head and the loss, and the remainder is smaller than pp, so it never gets one.
    In 1F1B an earlier stage stores activations of more micro batches, so later stages have the
    memory.
    """
    assert pp <= num_layers
    quotient, remainder = divmod(num_layers, pp)
    sizes = [quotient + (pp - 1 - remainder <= stage < pp - 1) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
