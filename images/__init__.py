"""Environments per CUDA version: the matrix of variants, and locks held against it."""
