"""AdamW variants, gradient clipping and learning-rate schedules."""
