"""Pretraining of Mixture-of-Experts models of biological sequences, from FASTA to an evaluated model."""

__version__ = "0.1.0"
