"""The parts of `train_lm.py`: its text, its model, its checkpoints, and its report."""
