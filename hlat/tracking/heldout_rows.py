"""Values of `evaluate` events that belong to the same text."""

from hlat.tracking.row_validation import Row, is_finite_number


def get_loop_row(row: Row) -> Row:
    """Return the values of an `evaluate` event for the text of the evaluations within the run.

    The last evaluation of a run has more text than the others, and contains both values.
    """
    loop = row.get("loop")
    return loop if isinstance(loop, dict) else row


def get_average_row(row: Row) -> Row:
    """Return the values of `get_loop_row` for the moving average of the weights; empty without."""
    average = row.get("ema")
    return get_loop_row(average) if isinstance(average, dict) else {}


def find_worse_sources(first: Row, last: Row) -> dict[str, list[float]]:
    """Return bits per byte at the first and at the last evaluation of sources that became worse.

    Both are those of the same text, and differ in the three decimal places that are shown.
    """
    before, after = (_get_bits_per_byte(get_loop_row(row)) for row in (first, last))
    return {
        name: [before[name], value]
        for name, value in after.items()
        if name != "mean" and name in before and round(value, 3) > round(before[name], 3)
    }


def _get_bits_per_byte(row: Row) -> dict[str, float]:
    values = row.get("bits_per_byte")
    items = values.items() if isinstance(values, dict) else ()
    return {name: float(value) for name, value in items if is_finite_number(value)}
