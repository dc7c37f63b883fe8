"""Turns corpora as people have them into folders that a run maps, and looks into them."""
