"""The command line of cavectl: talks to the local daemon, starts it when none runs."""

__version__ = "0.1.0"
