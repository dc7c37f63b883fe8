"""Machinery that trains a model, behind one seam."""
