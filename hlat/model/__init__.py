"""Components of the decoder: specifications (*_spec.py, without torch) and torch modules."""
