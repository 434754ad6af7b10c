"""Scores of a trained model: likelihood, samples, the report."""
