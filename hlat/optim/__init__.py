"""Optimizers, the global gradient norm and learning-rate schedules.

The engines apply clip_grad_norm_ in `train_step`.
"""
