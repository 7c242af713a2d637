"""Speculative decoding: guesses of what comes next, checked by the model many at a time. See adaptive.py."""
