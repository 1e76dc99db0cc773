"""Measurements; each prints a table and writes JSON into build/."""
