"""The command line of cavectl.

Owns what a person types and sees; models, the store and generation belong to the daemon, reached over HTTP.
Importing this package costs nothing: commands import what they need when they run.
"""

from daemon import __version__ as __version__
