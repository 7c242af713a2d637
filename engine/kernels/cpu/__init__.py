"""The CPU backend: C++ sources, how they become a library (build.py), and the way into it (lib.py). No torch, no numpy."""
