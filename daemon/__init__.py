"""The daemon: HTTP, the store, text and the worker processes. Importing the package itself costs nothing."""

__version__ = "0.1.0"  # the one place in code; pyproject.toml says the same, and a test compares them
