"""Causal self-attention in linear memory."""
